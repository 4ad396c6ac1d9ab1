"""Short steps, where the GPU works for less than the host takes to tell it what to do: models of the field suite.

    python -m benchmarks.training.short_steps --jobs 16 --gpus 2 --json FILE
    python -m benchmarks.training.short_steps --only "nano*" --busy 8      beside eight processes that keep cores busy
    python -m benchmarks.training.short_steps --tiny                       small models on a CPU: that it runs, no times

Default options; ours has 8-bit states, the others have torch's fused AdamW. Medians after warm-up. While one system is
timed, those that compile beside it are stopped.

ms                     from the end of a step to the end of the next, as training queues them
fwd, bwd, opt          milliseconds of the host: until forward, backward and the optimizer have been launched
host                   the same of the whole step; with "a graph a step" (`fp8compile.capture_step`), of its launch
first, later           GiB allocated at most during the first steps, and during later ones; replays of a CUDA graph
                       allocate nothing, and hold what the step took when it was captured
in FP8                 matmuls; the note says why there are none

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Libraries look for a GPU when they are imported: asked of its driver, no fork of this process has to do without.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

import fp8compile
from benchmarks.field.models import BY_NAME
from benchmarks.field.steps import compiled
from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Column, Row, figure, ratio
from benchmarks.harness.measuring import intervals, peak_gib
from benchmarks.harness.peers import BASELINE, System, ours, torchao
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark

NAMES = (
    "Llama 1.1B wide · 1×1024", "nanoGPT's loop", "Swin-B · FP32 under autocast", "ViT-L · FP32 under autocast",
    "ViT-B · BF16", "DINOv2-L wide", "EVA-02-B", "MLP-Mixer-B", "RoBERTa · classes", "T5 · gated", "GPT-2 large wide",
    "Gemma 2", "DistilBERT", "ConvNeXt-T · channels last · BF16", "Autoencoder of convolutions",
)  # fmt: skip
GRAPHS, ONE_GRAPH = "CUDA graphs", "a graph a step"
SYSTEMS = (
    BASELINE,
    System(f"{BASELINE.name}, {GRAPHS}", {"mode": "reduce-overhead"}),
    System(f"{BASELINE.name}, {ONE_GRAPH}"),
    torchao("tensorwise"),
    ours("8-bit states", eight_bit=True),
    ours(f"8-bit states, {GRAPHS}", eight_bit=True, mode="reduce-overhead"),
    ours(f"8-bit states, {ONE_GRAPH}", eight_bit=True),
)
WARMUP, STEPS, TINY_STEPS = 6, 30, 2
BUSY = "BUSY_CORES"  # in the environment, for the processes that measure
PARTS = ("forward_host_ms", "backward_host_ms", "update_host_ms")
COLUMNS = (
    figure("ms", "ms", ".2f"),
    ratio("speed-up", "ms"),
    figure("fwd", PARTS[0]),
    figure("bwd", PARTS[1]),
    figure("opt", PARTS[2]),
    figure("host", "host_ms"),
    figure("first", "first_peak_gib", ".2f"),
    figure("later", "peak_gib", ".2f"),
    Column("in FP8", lambda row, _: row.get("in_fp8") or ""),
)


class Training:
    """One system that trains one model of the field suite; a step takes the next batch."""

    def __init__(self, case: Case, system: System | None = None):
        self.system = system or next(s for s in SYSTEMS if s.name == case.system)
        self.row, self.device = BY_NAME[case.model], case.device
        self.task = self.row.built(case.device, small=case.tiny)
        self.run: Any = compiled(self.system, self.task, case.device)
        self.opt, self.opt_step = peers.optimizer(self.system, self.task.model, case.device)
        self.count = 0
        self.captured: Any = None
        if ONE_GRAPH in self.system.name:
            for group in self.opt.param_groups:
                group["capturable"] = True
            self.captured = fp8compile.capture_step(self.train, self.task.model, self.opt)

    def step(self) -> list[float]:
        """Milliseconds until forward, backward and the update were launched; of one graph, until it was."""
        batch = self.task.batches[self.count % len(self.task.batches)]
        self.count += 1
        if GRAPHS in self.system.name:
            torch.compiler.cudagraph_mark_step_begin()
        times = [time.perf_counter()]
        if self.captured is not None:
            self.captured(batch)
            times.append(time.perf_counter())
        else:
            self.train(batch, times)
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]

    def train(self, batch: Any, times: list[float] | None = None) -> None:
        """Train on a batch; adds to `times` when each part was launched."""
        launched = [] if times is None else times
        with self.row.forward_in(self.device):
            loss = self.task.loss(self.run, batch)
        launched.append(time.perf_counter())
        loss.backward()
        launched.append(time.perf_counter())
        self.opt_step()
        launched.append(time.perf_counter())
        self.opt.zero_grad(set_to_none=True)


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one model."""
    training = Training(case)
    warmup, count = (1, TINY_STEPS) if case.tiny else (WARMUP, STEPS)
    first, _ = peak_gib(training.step, 3, case.device)
    plans = [plan for plan in fp8compile.compiles() if plan.matmuls]
    with case.alone(), busy(int(os.environ.get(BUSY, "0"))):
        for _ in range(warmup):
            training.step()
        ms = statistics.median(intervals(training.step, count, case.device))
        parts = [waited_for(training) for _ in range(count)]
    peak, _ = peak_gib(training.step, 2, case.device)
    if any(name in case.system for name in (GRAPHS, ONE_GRAPH)):
        peak = first
    why = {m.reason for plan in plans for m in plan.matmuls if m.code == "host"}
    medians = [statistics.median(times) for times in zip(*parts, strict=True)]
    return {
        "ms": ms,
        **(dict(zip(PARTS, medians, strict=True)) if len(medians) > 1 else {}),
        "host_ms": statistics.median(map(sum, parts)),
        "first_peak_gib": first,
        "peak_gib": peak,
        "in_fp8": peers.in_fp8(training.system, training.task.model),
        "note": peers.failure() or next(iter(why), ""),
    }


def waited_for(training: Training) -> list[float]:
    """Return a step that begins when the GPU has nothing to do."""
    if training.device == "cuda":
        torch.cuda.synchronize()
    return training.step()


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spin, daemon=True) for _ in range(cores)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def spin() -> None:
    while True:
        sum(range(10_000))


BENCHMARK = Benchmark(
    "short_steps",
    {name: [s.name for s in SYSTEMS] for name in NAMES},
    measure,
    COLUMNS,
    BASELINE.name,
    axes=(("peak_gib", "peak, GiB"), ("ms", "step, ms")),
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--busy" in given:
        at = given.index("--busy")
        os.environ[BUSY] = given[at + 1]
        del given[at : at + 2]
    return runs.main(BENCHMARK, __doc__, given)


if __name__ == "__main__":
    main()
