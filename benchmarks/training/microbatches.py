"""Steps that accumulate the gradients of several microbatches, with weights cast once a step, and once a microbatch.

    python -m benchmarks.training.microbatches --only "Llama 1.1B*" --json FILE    one GPU
    python -m benchmarks.training.microbatches --tiny    tiny models on a CPU: that it runs, no times

Models are those of train_step.py, with shorter batches, eight of which make a step; the optimizer steps once. All
systems train the same weights on the same tokens. Columns are those of train_step.py; ms is of a whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import runs
from benchmarks.harness.columns import Row
from benchmarks.harness.peers import BASELINE, MASKS_FOLDED, TORCHAO, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import MODULES, WORKLOADS, Workload
from benchmarks.training.train_step import COLUMNS, EIGHT_BIT, Training, figures

MICROBATCHES = 8
KEPT = ours("8-bit states, casts kept", eight_bit=True, keep_casts=True)
SYSTEMS = (BASELINE, MASKS_FOLDED, EIGHT_BIT, KEPT, TORCHAO[0])
BATCHES = {  # of each row the model, sequences of a microbatch, and their length
    "Llama 1.1B": ("Llama 1.1B", 2, 2048),
    "Llama-8B (8 layers)": ("Llama-8B (8 layers)", 1, 4096),
    "Llama-8B (8 layers) 1×2048": ("Llama-8B (8 layers)", 1, 2048),
    "Mixtral (8 layers)": ("Mixtral (8 layers)", 2, 2048),
}


class Accumulating(Training):
    """A training whose step adds up the gradients of several microbatches."""

    def step(self) -> None:
        losses = []
        for _ in range(MICROBATCHES):
            loss = self.run(**self.batch) / MICROBATCHES
            loss.backward()
            losses.append(loss.detach())
        self.opt_step()
        self.opt.zero_grad(set_to_none=True)
        self.loss = torch.stack(losses).sum()

    def tokens(self) -> int:
        return MICROBATCHES * super().tokens()


def workload(name: str) -> Workload:
    """Return the workload of train_step.py for a row, with the batch of a microbatch."""
    model, batch, length = BATCHES[name]
    given = next(w for w in WORKLOADS if w.name == model)
    return replace(given, batch=batch, length=length)


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one model."""
    return figures(Accumulating(case, workload(case.model), SYSTEMS), case)


BENCHMARK = Benchmark(
    "microbatches",
    {name: [s.name for s in SYSTEMS] for name in BATCHES},
    measure,
    COLUMNS,
    BASELINE.name,
    axes=(("above_gib", "peak above weights and states, GiB"), ("ms", "step, ms")),
    imports=MODULES,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
