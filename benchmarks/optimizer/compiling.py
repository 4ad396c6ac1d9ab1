"""Seconds to AdamW's first step, and the host's milliseconds of a later one, by number of tensors, beside its peers.

python -m benchmarks.optimizer.compiling [--counts 20,150,500,1000] [--only ours,…] [--json FILE]     # one GPU
python -m benchmarks.optimizer.compiling --tiny                        # anywhere, two minutes

first     seconds until the first step is done: compiled in a new process, with empty caches
host      median of the milliseconds that a step keeps the host, while the device has nothing else to do; gradients are
          other tensors in each step, as after `zero_grad()`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.measuring import machine

COUNTS, TINY_COUNTS = (20, 150, 500, 1000), (5,)  # foreach takes minutes to compile more on a CPU
SHAPES = ((256, 256), (256,), (256, 64))
STEPS = 20


def ours(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    import fp8compile  # noqa: F401  (what registers the backend takes no part of the time)

    return torch.compile(torch.optim.AdamW(_groups(parameters)).step, backend="fp8")


def as_a_whole(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    """Ours, but the step is one graph of all parameters, as that of an optimizer that nobody knows."""
    from fp8compile.backend import fp8

    opt = torch.optim.AdamW(_groups(parameters))
    return torch.compile(opt.step, backend=lambda gm, inputs: fp8(gm, inputs))


def fused(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    return torch.optim.AdamW(_groups(parameters), fused=True).step


def foreach(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    on_gpu = parameters[0].is_cuda
    return torch.compile(torch.optim.AdamW(_groups(parameters), foreach=True, capturable=on_gpu).step)


def torchao(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    return import_module("torchao.optim").AdamWFp8(_groups(parameters)).step


ROWS = {"ours": ours, "ours, as a whole": as_a_whole, "fused": fused, "foreach": foreach, "torchao": torchao}
FEW = {"ours, as a whole": 150}  # tensors at most: the time grows with their number


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups, as people make them: matrices decay, vectors do not."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@dataclass
class Result:
    """What one row measured of so many tensors."""

    name: str
    tensors: int
    first_s: float | None
    host_ms: float | None
    note: str = ""


def measure_here(name: str, count: int, device: str) -> Result:
    """Measure in this process."""
    parameters = [
        nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)], device=device, dtype=torch.bfloat16)) for i in range(count)
    ]
    step, times = ROWS[name](parameters), []
    for _ in range(STEPS + 1):
        for p in parameters:
            p.grad = torch.randn_like(p)
        _wait(device)
        start = time.perf_counter()
        step()
        if not times:
            _wait(device)  # the first is done when the device is
        times.append(time.perf_counter() - start)
    return Result(name, count, times[0], statistics.median(times[3:]) * 1e3)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, count: int, device: str) -> Result:
    """Measure in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "benchmarks.optimizer.compiling", "--here", name, "--counts", str(count)]
        command += ["--tiny"] if device == "cpu" else []
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        return Result(name, count, None, None, (done.stderr.strip().splitlines() or ["failed"])[-1][:100])
    return Result(**json.loads(done.stdout.strip().splitlines()[-1]))


def line(result: Result) -> str:
    first, host = ("–" if x is None else f"{x:.{digits}f}" for x, digits in ((result.first_s, 1), (result.host_ms, 2)))
    return f"{result.name:20} {result.tensors:8} {first:>8} {host:>8} {result.note}"


def _numbers(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=_numbers, help="numbers of tensors, with commas")
    parser.add_argument("--only", default=",".join(ROWS).replace("ours, as a whole", "whole"), help="rows, with commas")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args(arguments)
    device, counts = ("cpu", given.counts or TINY_COUNTS) if given.tiny else ("cuda", given.counts or COUNTS)
    if given.here:
        print(json.dumps(asdict(measure_here(given.here, counts[0], device))))
        return []
    wanted = ["ours, as a whole" if name == "whole" else name for name in given.only.split(",")]
    print(f"{'':20} {'tensors':>8} {'first':>8} {'host':>8}")
    results = []
    for count in counts:
        for name in (n for n in wanted if count <= FEW.get(n, count)):
            results.append(measure(name, count, device))
            print(line(results[-1]), flush=True)
            if given.json:
                rows = [asdict(r) for r in results]
                given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return results


if __name__ == "__main__":
    main()
