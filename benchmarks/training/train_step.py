"""Whole training steps of Hugging Face models: forward, loss, backward and AdamW, in FP8 and beside its peers.

    python -m benchmarks.training.train_step --only "Llama 1.1B" --json FILE [--picture FOLDER]    one GPU
    python -m benchmarks.training.train_step --tiny    tiny models on a CPU: that it runs, no times

Random weights and tokens, BF16 parameters, medians after warm-up. All systems train the same weights on the same batch.

ms        median time of a step, from the end of one to the end of the next
peak      GiB allocated at most; above: beyond weights and optimizer states
states    bytes of optimizer state a parameter
compile   seconds of the first step, with empty caches: compiling, and running once
at first  GiB allocated at most during that step, compiling included
loss      at the last step: it shows that a system trains

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters  # graph breaks would make several graphs

from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.measuring import bytes_of, intervals, peak_gib
from benchmarks.harness.peers import BASELINE, EAGER, FAST_GRAD_INPUT, MASKS_FOLDED, TORCHAO, System, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import MODULES, WORKLOADS, Workload

EIGHT_BIT = ours("8-bit states", eight_bit=True)
MASKS_MADE = ours("8-bit states, masks made", eight_bit=True, fold_masks=False)
FAST = ours("8-bit states, fast grad_input", eight_bit=True, recipe=FAST_GRAD_INPUT)
FP8_HEAD = ours("8-bit states, FP8 head", eight_bit=True, lm_head=True, chunk_loss=True)
SYSTEMS = (BASELINE, EAGER, MASKS_FOLDED, ours(), EIGHT_BIT, MASKS_MADE, FAST, FP8_HEAD, *TORCHAO)
WARMUP, STEPS, TINY_STEPS = 4, 20, 2
COLUMNS = (
    figure("ms", "ms"),
    ratio("speed-up", "ms"),
    figure("tokens/s", "tokens_per_second", ".0f"),
    figure("peak", "peak_gib", ".2f"),
    ratio("of BF16's", "peak_gib", inverse=True),
    figure("above", "above_gib", ".2f"),
    figure("states", "state_bytes", ".2f"),
    figure("compile", "compile_seconds"),
    figure("at first", "first_peak_gib", ".2f"),
    figure("loss", "loss", ".4f"),
)


class Training:
    """One system that trains one model: the workload of the case's name, or another, by one of `systems`."""

    def __init__(self, case: Case, workload: Workload | None = None, systems: Sequence[System] = SYSTEMS):
        workload = self.workload = workload or next(w for w in WORKLOADS if w.name == case.model)
        self.system = next(s for s in systems if s.name == case.system)
        self.model = workload.built(case.device, case.tiny)
        self.batch = workload.made(self.model, case.device, case.tiny)
        self.run: Any = peers.prepare(self.system, self.model, case.device)
        self.opt, self.opt_step = peers.optimizer(self.system, self.model, case.device)
        self.loss = torch.zeros(())

    def step(self) -> None:
        loss = self.run(**self.batch)
        loss.backward()
        self.opt_step()
        self.opt.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def tokens(self) -> int:
        """Tokens, or images, of a step."""
        return self.batch["labels"].numel()

    def timed_step(self) -> float:
        """Seconds of a step that is waited for."""
        start = time.perf_counter()
        self.step()
        self.loss.item()
        return time.perf_counter() - start

    def state_bytes(self) -> float:
        """Bytes of optimizer state for each parameter."""
        state = sum(bytes_of(x) for states in self.opt.state.values() for x in states.values())
        return state / sum(p.numel() for p in self.model.parameters())


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one model."""
    return figures(Training(case), case)


def figures(training: Training, case: Case) -> dict[str, Any]:
    """Return the figures of steps of `training`, the first one among them."""
    first: list[float] = []
    first_peak, _ = peak_gib(lambda: first.append(training.timed_step()), 1, case.device)
    graphs = counters["stats"]["unique_graphs"]
    count = TINY_STEPS if case.tiny else STEPS
    for _ in range(1 if case.tiny else WARMUP):
        training.step()
    with case.alone():
        ms = statistics.median(intervals(training.step, count, case.device))
    peak, above = peak_gib(training.step, 2, case.device)
    return {
        "ms": ms,
        "tokens_per_second": training.tokens() / ms * 1e3,
        "peak_gib": peak,
        "above_gib": above,
        "state_bytes": training.state_bytes(),
        "compile_seconds": None if case.turns else first[0],
        "first_peak_gib": first_peak,
        "loss": float(training.loss),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "graphs": graphs,
        "in_fp8": peers.in_fp8(training.system, training.model),
        "note": peers.failure(),
    }


BENCHMARK = Benchmark(
    "train_step",
    {w.name: [s.name for s in SYSTEMS] for w in WORKLOADS},
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
