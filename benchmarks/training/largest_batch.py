"""The largest batch that trains within a given part of a GPU's memory, and the tokens a second it trains with.

    python -m benchmarks.training.largest_batch --only "Llama 1.1B*40*" --json FILE    one GPU
    python -m benchmarks.training.largest_batch --tiny    a tiny model on a CPU, with a made-up limit: that it runs

Models and systems are those of train_step.py. The allocator may take no more than the GiB in a row's name, its caches
included (`torch.cuda.set_per_process_memory_fraction`). Two small batches give a first guess, as peaks grow with the
batch; from there batches are trained one larger or one smaller, each compiled anew, until one trains and the next does
not. Each trains a few steps, the first of which makes the optimizer's states.

batch     sequences, or images, of the largest batch
ms        median time of its step
tokens/s  with that batch; speed-up: beside the baseline with the largest batch of its own
peak      GiB allocated at most with it
tried     batches that were trained, or could not be
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.measuring import intervals, peak_gib
from benchmarks.harness.peers import BASELINE, MASKS_FOLDED, TORCHAO, LeftOutError
from benchmarks.harness.processes import Case, forget
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import MODULES, WORKLOADS
from benchmarks.training.train_step import EIGHT_BIT, Training

SYSTEMS = (BASELINE, MASKS_FOLDED, EIGHT_BIT, TORCHAO[0])
LIMITS = (40, 80)  # GiB
SMALL = (1, 2)  # the batches of the first guess
TINY_LIMIT = 5  # sequences that a CPU is said to hold, and the first guess there
WARMUP, STEPS = 3, 10
COLUMNS = (
    figure("batch", "batch", ".0f"),
    ratio("of BF16's", "batch", inverse=True),
    figure("ms", "ms"),
    figure("tokens/s", "tokens_per_second", ".0f"),
    ratio("speed-up", "ms_per_token"),
    figure("peak", "peak_gib", ".2f"),
    figure("tried", "tried", ".0f"),
)
LARGE = ("Llama 1.1B", "Qwen2 1.5B", "Llama-8B (8 layers)")
Trained = dict[str, Any]


def largest(train: Callable[[int], Trained | None], guess: int) -> tuple[Trained | None, int]:
    """Return what the largest batch gave that trains, None where not one sequence does, and how many were tried.

    train: returns what training a batch gave, None where the memory was too small. guess: the batch tried first.
    """
    found, batch, step, tried = None, max(guess, 1), 0, 0
    while batch >= 1:
        given, tried = train(batch), tried + 1
        now = 1 if given else -1
        found = given or found
        if step and now != step:  # of two neighbours one trains and one does not
            break
        step, batch = now, batch + now
    return found, tried


def guessed(small: Sequence[tuple[int, float]], limit: float) -> int:
    """Return the batch whose peak, GiB, lies at `limit` on the line through the peaks of two batches."""
    (a, first), (b, second) = small
    return max(b, math.floor(a + (limit - first) * (b - a) / max(second - first, 1e-6)))


def trained(case: Case, name: str, batch: int) -> Trained | None:
    """Return the figures of training `batch` sequences; None where memory did not suffice."""
    if case.tiny and batch > TINY_LIMIT:
        return None
    forget()
    workload = dataclasses.replace(next(w for w in WORKLOADS if w.name == name), batch=batch)
    try:
        training = Training(case, workload)
        first, _ = peak_gib(training.step, 2, case.device)
        for _ in range(0 if case.tiny else WARMUP):
            training.step()
        with case.alone():
            ms = statistics.median(intervals(training.step, 1 if case.tiny else STEPS, case.device))
        later, _ = peak_gib(training.step, 2, case.device)
    except torch.OutOfMemoryError:
        return None
    items = training.batch["labels"].numel()
    return {
        "batch": batch, "ms": ms, "tokens_per_second": items / ms * 1e3, "ms_per_token": ms / items,
        "peak_gib": max(first, later), "loss": float(training.loss),
        "in_fp8": peers.in_fp8(training.system, training.model), "note": peers.failure(),
    }  # fmt: skip


def measure(case: Case) -> Trained:
    """Return the figures of one system with the largest batch of one model in so many GiB."""
    name, _, limit = case.model.partition(" · ")
    gib = float(limit.removesuffix(" GiB"))
    small = [found for batch in SMALL if (found := trained(case, name, batch))]
    if case.device == "cuda":
        limit_memory(gib)
    guess = guessed([(x["batch"], x["peak_gib"]) for x in small], gib) if len(small) == len(SMALL) else 1
    found, tried = largest(lambda batch: trained(case, name, batch), TINY_LIMIT if case.tiny else guess)
    if found is None:
        raise LeftOutError("not one sequence fits")
    return {**found, "tried": tried + len(SMALL)}


def limit_memory(gib: float) -> None:
    """Let this process take no more than `gib` GiB of its GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / torch.cuda.mem_get_info()[1], 1.0))


BENCHMARK = Benchmark(
    "largest_batch",
    {f"{name} · {gib} GiB": [s.name for s in SYSTEMS] for name in LARGE for gib in LIMITS},
    measure,
    COLUMNS,
    BASELINE.name,
    axes=(("batch", "sequences of the largest batch"), ("ms_per_token", "ms a token")),
    imports=MODULES,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
