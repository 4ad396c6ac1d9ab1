"""One optimizer step on 872 M parameters (four Llama-8B blocks), with 8-bit states, beside its peers.

python -m benchmarks.optimizer.step [--only log*,fused] [--json FILE]       # one GPU, a few minutes
python -m benchmarks.optimizer.step --tiny                                  # anywhere: that it runs, no times

ms        median of device times of a step, caches of the last step's data in place as in training
state     bytes of state a parameter
floor     bytes that must move (each tensor read, and written where it changes) at the rate of a device copy
extra     MiB that the step allocates beyond what it keeps
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.measuring import MIB, bytes_of, device_milliseconds, machine

ATTENTION = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
BLOCK = [*ATTENTION, (14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)]
TINY = [(64, 64), (65, 70), (64,)]
RATE, DECAY = 1e-4, 0.1
Step = Callable[[], Any]
Made = tuple[torch.optim.Optimizer, Step]


def ours(states: Any, parameters: list[nn.Parameter]) -> Made:
    opt = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
    return opt, torch.compile(opt.step, backend="fp8", options={"states": states, "strict": True})


def fused(parameters: list[nn.Parameter]) -> Made:
    opt = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    return opt, opt.step


def foreach(parameters: list[nn.Parameter]) -> Made:
    on_gpu = parameters[0].is_cuda
    opt = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, foreach=True, capturable=on_gpu)
    return opt, torch.compile(opt.step)


def torchao(name: str, parameters: list[nn.Parameter]) -> Made:
    opt = getattr(import_module("torchao.optim"), name)(parameters, lr=RATE, weight_decay=DECAY)
    return opt, opt.step


@dataclass(frozen=True)
class Row:
    """A way to step, the dtype of its parameters, and the bytes that it must move for each."""

    name: str
    dtype: torch.dtype
    moved: float
    make: Callable[[list[nn.Parameter]], Made]


def eight_bit(name: str, states: Any, dtype: torch.dtype = torch.bfloat16, more: float = 0.0) -> Row:
    """Parameter read and written, gradient read, two payloads and side data read and written."""
    moved = 3 * dtype.itemsize + 4 + 4 * 8 / 128 + more
    return Row(name, dtype, moved, lambda parameters: ours(states, parameters))


LINEAR = {"first": "e4m3/linear", "second": "e5m2/linear"}  # in E4M3 small second moments become zero
ROWS = [
    eight_bit("log", None),
    eight_bit("log, nearest", "log"),
    eight_bit("e4m3", "e4m3"),
    eight_bit("e4m3 + e5m2", {"first": "e4m3", "second": "e5m2"}),
    eight_bit("linear", LINEAR),
    eight_bit("log, stochastic parameters", {"parameters": "stochastic"}),
    eight_bit("log, split master", {"parameters": "split"}, more=4),
    eight_bit("log, FP32 parameters", None, torch.float32),
    Row("torch fused, BF16 states", torch.bfloat16, 14, fused),
    Row("torch foreach compiled, BF16 states", torch.bfloat16, 14, foreach),
    Row("torch fused, FP32", torch.float32, 28, fused),
    Row("torchao AdamWFp8", torch.bfloat16, 10, lambda parameters: torchao("AdamWFp8", parameters)),
    Row("torchao AdamW8bit", torch.bfloat16, 10, lambda parameters: torchao("AdamW8bit", parameters)),
]


@dataclass
class Result:
    """What one row measured."""

    name: str
    ms: float | None
    floor_ms: float | None
    state_bytes: float
    extra_mib: float | None
    note: str = ""


def copy_rate() -> float:
    """Bytes that a copy of 1 GiB reads and writes in a millisecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_milliseconds(lambda: target.copy_(source))


def measure(row: Row, shapes: list[tuple[int, ...]], rate: float | None) -> Result:
    device = "cpu" if rate is None else "cuda"
    torch._dynamo.reset()
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(s, device=device, dtype=row.dtype) * 0.02) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    count = sum(p.numel() for p in parameters)
    try:
        opt, step = row.make(parameters)
        for _ in range(3):
            step()
    except ImportError as error:
        return Result(row.name, None, None, 0.0, None, f"not installed: {error.name}")
    state = sum(bytes_of(x) for states in opt.state.values() for x in states.values())
    if rate is None:
        return Result(row.name, None, None, state / count, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra = (torch.cuda.max_memory_allocated() - before) / MIB
    return Result(row.name, device_milliseconds(step), row.moved * count / rate, state / count, extra)


def line(result: Result) -> str:
    ms, floor, extra = (
        "–" if x is None else f"{x:.{digits}f}"
        for x, digits in ((result.ms, 3), (result.floor_ms, 3), (result.extra_mib, 1))
    )
    share = "–" if not (result.ms and result.floor_ms) else f"{result.floor_ms / result.ms:.0%}"
    return f"{result.name:38} {ms:>8} {floor:>8} {share:>6} {result.state_bytes:8.3f} {extra:>9} {result.note}"


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="rows, as patterns with commas")
    parser.add_argument("--tiny", action="store_true", help="tiny parameters on the CPU, without times")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args(arguments)
    rate = None if given.tiny else copy_rate()
    shapes = TINY if given.tiny else BLOCK * 4
    print(f"{'':38} {'ms':>8} {'floor':>8} {'share':>6} {'state':>8} {'extra':>9}")
    results = []
    for row in ROWS:
        if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in given.only.split(",")):
            results.append(measure(row, shapes, rate))
            print(line(results[-1]), flush=True)
            if given.json:
                figures = {"machine": machine(), "bytes_per_ms": rate, "rows": [asdict(r) for r in results]}
                given.json.write_text(json.dumps(figures, indent=1))
    return results


if __name__ == "__main__":
    main()
