"""Compare short steps of BF16 and of ours in one process, by turns: a noisy host slows both alike.

    python -m benchmarks.training.paired_steps --jobs 11 --json FILE
    python -m benchmarks.training.paired_steps --only "ViT-B*,DINOv2*"
    python -m benchmarks.training.paired_steps --tiny                      small models on a CPU: that it runs, no times

Models of short_steps.py, where each system has a process of its own: two processes of the same system then differ by up
to a half on a host that others use as well. Here all train in one process, a few steps each by turns; medians of all.

BF16           milliseconds of a step of `torch.compile` with torch's fused AdamW
plain, 8 bits  the same of ours, with torch's AdamW (times BF16's: how often faster), and with 8-bit states
host           milliseconds of each until a step has been launched: forward, backward and optimizer

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import runs
from benchmarks.harness.columns import MISSING, Column, Row, figure
from benchmarks.harness.measuring import intervals
from benchmarks.harness.peers import BASELINE, System, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.training.short_steps import NAMES, Training, waited_for

SYSTEMS: dict[str, System] = {"bf16": BASELINE, "plain": ours("plain states"), "8_bits": ours("8-bit", eight_bit=True)}
TOGETHER = "by turns"
WARMUP, TURNS, STEPS, WAITED = 5, 12, 6, 4  # before the first turn; in each: steps that are queued, and launched alone


def _times(head: str, key: str) -> Column:
    def cell(row: Row, _: Row | None) -> str:
        mine, theirs = row.get(f"{key}_ms"), row.get("bf16_ms")
        return f"{theirs / mine:.2f}×" if mine and theirs else MISSING

    return Column(head, cell)


COLUMNS = (
    figure("BF16", "bf16_ms", ".2f"),
    figure("plain", "plain_ms", ".2f"),
    _times("speed-up", "plain"),
    figure("8 bits", "8_bits_ms", ".2f"),
    _times("speed-up", "8_bits"),
    figure("host", "bf16_host_ms"),
    figure("plain", "plain_host_ms"),
    figure("8 bits", "8_bits_host_ms"),
)


def measure(case: Case) -> dict[str, Any]:
    """The figures of all systems on one model."""
    trained = {name: Training(case, system) for name, system in SYSTEMS.items()}
    turns, warmup = (1, 1) if case.tiny else (TURNS, WARMUP)
    for training in trained.values():
        for _ in range(warmup):
            training.step()
    if case.device == "cuda":
        torch.cuda.synchronize()
    ms: dict[str, list[float]] = {name: [] for name in trained}
    host: dict[str, list[list[float]]] = {name: [] for name in trained}
    with case.alone():
        for _ in range(turns):
            for name, training in trained.items():
                training.step()
                ms[name] += intervals(training.step, STEPS, case.device)
                host[name] += [waited_for(training) for _ in range(WAITED)]
    found: dict[str, Any] = {f"{name}_ms": statistics.median(times) for name, times in ms.items()}
    for name, steps in host.items():
        parts = [statistics.median(times) for times in zip(*steps, strict=True)]
        found |= {f"{name}_host_ms": sum(parts), f"{name}_parts_ms": parts}
    return found


BENCHMARK = Benchmark(
    "paired_steps",
    {name: [TOGETHER] for name in NAMES},
    measure,
    COLUMNS,
    TOGETHER,
    axes=(("bf16_ms", "step in BF16, ms"), ("8_bits_ms", "step, ms")),
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
