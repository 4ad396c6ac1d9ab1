"""Compare short steps of BF16 and of ours in one process, by turns: a noisy host slows both alike.

    python -m benchmarks.training.paired_steps --jobs 11 --json FILE
    python -m benchmarks.training.paired_steps --only "ViT-B*,DINOv2*,MLP*"
    python -m benchmarks.training.paired_steps --tiny                      small models on a CPU: that it runs, no times

Rows of the field suite, where each system has a process of its own: two processes of the same system then differ by up
to a half on a host that others use as well. Here all train in one process, a few steps each by turns, each as often the
first one; medians of all.

BF16           milliseconds of a step of `torch.compile` with torch's fused AdamW
ours, 8-bit    the same of ours, with torch's AdamW and with 8-bit states, and how often it is faster
host …         milliseconds of each until a step has been launched: forward, backward and optimizer

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.field.models import MODELS
from benchmarks.harness import peers, runs
from benchmarks.harness.columns import MISSING, Column, Row, figure
from benchmarks.harness.measuring import intervals
from benchmarks.harness.peers import BASELINE, System, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.training.short_steps import Training, waited_for

SYSTEMS: dict[str, System] = {"bf16": BASELINE, "plain": ours("plain states"), "8_bits": ours("8-bit", eight_bit=True)}
TOGETHER = "by turns"
WARMUP, TURNS, STEPS, WAITED = 5, 12, 6, 4  # before the first turn; in each: steps that are queued, and launched alone


def _times(head: str, key: str) -> Column:
    def cell(row: Row, _: Row | None) -> str:
        mine, theirs = row.get(f"{key}_ms"), row.get("bf16_ms")
        return f"{theirs / mine:.2f}×" if mine and theirs else MISSING

    return Column(head, cell)


COLUMNS = (
    figure("BF16 ms", "bf16_ms", ".2f"),
    figure("ours ms", "plain_ms", ".2f"),
    _times("ours", "plain"),
    figure("8-bit ms", "8_bits_ms", ".2f"),
    _times("8-bit", "8_bits"),
    figure("host BF16", "bf16_host_ms"),
    figure("host ours", "plain_host_ms"),
    figure("host 8-bit", "8_bits_host_ms"),
    Column("in FP8", lambda row, _: row.get("in_fp8") or ""),
)


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of all systems on one model."""
    trained: dict[str, Training] = {}
    found: dict[str, Any] = {}
    turns, warmup = (1, 1) if case.tiny else (TURNS, WARMUP)
    for name, system in SYSTEMS.items():
        training = trained[name] = Training(case, system)
        for _ in range(max(warmup, len(training.task.batches))):
            training.step()
        if system.ours:  # what the first of them has compiled: the other compiles as much
            found.setdefault("in_fp8", peers.in_fp8(system, training.task.model))
    if case.device == "cuda":
        torch.cuda.synchronize()
    ms: dict[str, list[float]] = {name: [] for name in trained}
    host: dict[str, list[list[float]]] = {name: [] for name in trained}
    with case.alone():
        for turn in range(turns):
            for name in _from(turn, list(trained)):
                training = trained[name]
                training.step()
                count = len(training.task.batches)
                ms[name] += intervals(training.step, count * math.ceil(STEPS / count), case.device)
                host[name] += [waited_for(training) for _ in range(WAITED)]
    found |= {f"{name}_ms": statistics.median(times) for name, times in ms.items()}
    for name, steps in host.items():
        parts = [statistics.median(times) for times in zip(*steps, strict=True)]
        found |= {f"{name}_host_ms": sum(parts), f"{name}_parts_ms": parts}
    return found


def _from(turn: int, names: list[str]) -> list[str]:
    """Return all names, beginning with another one in each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


BENCHMARK = Benchmark(
    "paired_steps",
    {row.name: [TOGETHER] for row in MODELS},
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
