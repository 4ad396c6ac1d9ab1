"""How long compiling takes: the first forward and backward of a model, with empty caches and with warm ones.

    python -m benchmarks.training.compile_time --json FILE              one GPU, some minutes
    python -m benchmarks.training.compile_time --tiny                   tiny models on a CPU: that it runs

Seconds of the first forward and backward of a model in a new process, what is imported by then left out.

cold      with empty caches; warm: in another process, with the caches of the first
trace     of that, cold: Dynamo's trace of the model         autograd   AOTAutograd's trace of both halves
passes    ours: of the joint graph, the cut, and after it; one by one below the table
inductor  everything else of Inductor's                      kernels    waiting for Triton
rest      guards, autotuning, running once

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import compilation_time_metrics  # seconds of torch's own stages, by name

from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.peers import BASELINE, TORCHAO, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import MODULES, WORKLOADS
from fp8compile.passes import pipeline
from fp8compile.passes.core import verify
from fp8compile.passes.core.stages import Stage
from fp8compile.torch_hooks import partitioner

MODELS = ("Llama 1.1B", "Llama 100M")
SYSTEMS = (BASELINE, ours(), TORCHAO[0])
TRACE, AUTOGRAD, INDUCTOR, KERNELS = (
    "bytecode_tracing",
    "aot_trace_joint_graph",
    "compile_fx_inner",
    "async_compile.wait",
)
COLUMNS = (
    figure("cold", "cold_seconds"),
    ratio("of BF16's", "cold_seconds", inverse=True),
    figure("warm", "warm_seconds"),
    ratio("of BF16's", "warm_seconds", inverse=True),
    *(figure(name, name) for name in ("trace", "autograd", "passes", "inductor", "kernels", "rest")),
)


@contextmanager
def timed_passes() -> Iterator[dict[str, float]]:
    """Seconds of each of our passes that run in this context, by name, in the order in which they first ran."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                seconds[name] += time.perf_counter() - start

        return run

    timed_stages = (Stage.JOINT, Stage.HALF)  # the cut is timed as a whole
    steps = (
        replace(step, run=timed(step.name, step.run)) if step.stage in timed_stages else step
        for step in pipeline.PIPELINE
    )
    with (
        mock.patch.object(pipeline, "PIPELINE", tuple(steps)),
        mock.patch.object(verify, "verify", timed("verify", verify.verify)),
        mock.patch.object(partitioner.Partitioner, "__call__", timed("cut", partitioner.Partitioner.__call__)),
    ):
        yield seconds


def first_seconds(case: Case) -> float:
    """Seconds of the first forward and backward."""
    workload = next(w for w in WORKLOADS if w.name == case.model)
    system = next(s for s in SYSTEMS if s.name == case.system)
    model = workload.built(case.device, case.tiny)
    batch = workload.made(model, case.device, case.tiny)
    run = peers.prepare(system, model, case.device)
    start = time.perf_counter()
    run(**batch).backward()
    if not case.tiny:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cold(case: Case) -> dict[str, Any]:
    """Return what a first process takes, in all and by stage."""
    compilation_time_metrics.clear()
    with timed_passes() as passes:
        total = first_seconds(case)
    stages = {name: sum(times) for name, times in compilation_time_metrics.items()}
    return {
        "cold_seconds": total,
        **shares(total, stages, passes),
        "by_pass": dict(passes),
        "stages": stages,  # all that torch counted
        "note": peers.failure(),
    }


def shares(total: float, stages: dict[str, float], passes: dict[str, float]) -> dict[str, float]:
    """`total` by what took it. Passes after the cut run inside of Inductor, and their time is not counted as its."""
    inside = sum(passes.get(step.name, 0.0) for step in pipeline.PIPELINE if step.stage is Stage.HALF)
    trace, autograd, kernels = (stages.get(name, 0.0) for name in (TRACE, AUTOGRAD, KERNELS))
    inductor = max(0.0, stages.get(INDUCTOR, 0.0) - kernels - inside)
    parts = {
        "trace": trace,
        "autograd": autograd,
        "passes": sum(passes.values()),
        "inductor": inductor,
        "kernels": kernels,
    }
    return {**parts, "rest": total - sum(parts.values())}


def warm(case: Case) -> dict[str, Any]:
    """Return what a process takes that finds everything compiled."""
    return {"warm_seconds": first_seconds(case)}


def print_passes(rows: Sequence[Row]) -> None:
    """Milliseconds of each of our passes."""
    for row in rows:
        if row.get("by_pass"):
            times = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in row.get("by_pass").items())
            print(f"{row.model}, ms of each pass: {times}")


BENCHMARK = Benchmark(
    "compile_time",
    {model: [s.name for s in SYSTEMS] for model in MODELS},
    cold,
    COLUMNS,
    BASELINE.name,
    axes=(("warm_seconds", "with warm caches, seconds"), ("cold_seconds", "with empty caches, seconds")),
    imports=MODULES,
    again=warm,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the tables; see the top of this file."""
    rows = runs.main(BENCHMARK, __doc__, arguments)
    print_passes(rows)
    return rows


if __name__ == "__main__":
    main()
