"""Forward and backward of two decoder blocks, in FP8 and beside its peers: time, memory, gradients.

    python -m benchmarks.training.block --only Llama-8B --json FILE [--picture FOLDER]    one GPU
    python -m benchmarks.training.block --tiny    tiny blocks on a CPU: that it runs, no times

Random data and weights, BF16 parameters, medians after warm-up. All systems compute the same gradients.

ms        median time of forward and backward, from the end of one to the end of the next
saved     GiB a block that the allocator holds between forward and backward; plan: what ours said it would be
peak      GiB at most, beyond weights and gradients
cosine    least of all parameters' gradients with those of BF16 eager; error: largest relative error
compile   seconds of the first forward and backward, with empty caches: compiling, and running once

"fast gradients": with fast accumulation in gradients too, which no recipe has (benchmarks/micro/accumulation.py).

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import fp8compile
from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.measuring import GIB, intervals
from benchmarks.harness.peers import BASELINE, EAGER, FAST_GRADIENTS, TORCHAO, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.training import blocks

OURS = (ours(), ours("BF16 saved", save="bf16"), ours("fast gradients", recipe=FAST_GRADIENTS))
SYSTEMS = (BASELINE, EAGER, *OURS, *TORCHAO)
WARMUP, STEPS, TINY_STEPS = 3, 20, 2
COLUMNS = (
    figure("ms", "ms", ".2f"),
    ratio("speed-up", "ms"),
    figure("saved", "saved_gib", ".3f"),
    figure("plan", "predicted_gib", ".3f"),
    figure("peak", "peak_gib", ".2f"),
    ratio("of BF16's", "peak_gib", inverse=True),
    figure("cosine", "cosine", ".4f"),
    figure("error", "error", ".3f"),
    figure("compile", "compile_seconds"),
)


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one model."""
    size = next(s for s in blocks.SIZES if s.name == case.model)
    system = next(s for s in SYSTEMS if s.name == case.system)
    model, x, gradient = size.made(case.device, case.tiny)
    expected = blocks.gradients(model, model, x, gradient)
    run = peers.prepare(system, model, case.device)
    step = partial(blocks.step, run, model, x, gradient)
    start = time.perf_counter()
    step()
    if not case.tiny:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(0 if case.tiny else WARMUP):
        step()
    saved, peak = (0.0, 0.0) if case.tiny else blocks.memory(run, model, x, gradient)
    with case.alone():
        ms = statistics.median(intervals(step, TINY_STEPS if case.tiny else STEPS, case.device))
    quality = blocks.compare(expected, blocks.gradients(run, model, x, gradient))
    return {
        "ms": ms,
        "saved_gib": saved,
        "predicted_gib": fp8compile.last_compile().saved_bytes / GIB / blocks.LAYERS if system.ours else None,
        "peak_gib": peak,
        "cosine": min(cosine for cosine, _ in quality.values()),
        "error": max(error for _, error in quality.values()),
        "compile_seconds": None if case.turns else first,
        "parameters": sum(p.numel() for p in model.parameters()),
        "in_fp8": peers.in_fp8(system, model),
        "note": peers.failure(),
    }


BENCHMARK = Benchmark(
    "block",
    {size.name: [s.name for s in SYSTEMS] for size in blocks.SIZES},
    measure,
    COLUMNS,
    BASELINE.name,
    axes=(("peak_gib", "peak above weights and gradients, GiB"), ("ms", "forward and backward, ms")),
    imports=("transformers.models.gpt2.modeling_gpt2",),
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
