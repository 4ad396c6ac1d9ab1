"""What fast accumulation loses beside what casts lose, by the length of the sums.

    python -m benchmarks.micro.accumulation [--json FILE]    one GPU, seconds
    python -m benchmarks.micro.accumulation --tiny    on a CPU, which sums in FP32 whatever is asked: that it runs

FP8 matmuls of Hopper sum in registers of some 14 bits when `use_fast_accum` is set, else they add to FP32 every 128
elements. Both operands [N, K] are E4M3 under one scale. Signal to noise in dB:

cast      the product of the cast operands, in FP64, beside that of the operands themselves
sum       the matmul beside that product: what accumulation alone adds
all       the matmul beside the product of the operands themselves
shrunk    how much smaller the sums are, by least squares, in %
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.measuring import machine
from fp8compile.formats import E4M3

LENGTHS, TINY_LENGTHS = (1024, 4096, 16384, 65536), (256, 512)
ROWS, TINY_ROWS = 2048, 32
Cast = tuple[Tensor, Tensor]

# Of normal numbers x: terms of sums that cancel; that lean to one side; of many sizes; that all have one sign
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "mean of 1/4": lambda x: x + 0.25,
    "log-normal sizes": lambda x: x * torch.exp(torch.randn_like(x)),
    "all positive": torch.abs,
}


@dataclass
class Result:
    """Of one kind of data and one length of sums."""

    data: str
    k: int
    fast: bool
    cast: float
    sum: float
    all: float
    shrunk: float


def cast(x: Tensor) -> Cast:
    """x bf16[N, K] → its payload e4m3[N, K] and its scale f32[]."""
    scale = x.abs().max().float() / E4M3.max
    return (x.float() / scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn), scale


def decibels(signal: Tensor, found: Tensor) -> float:
    noise = (found - signal).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise))


def measure(data: str, rows: int, k: int, device: str) -> list[Result]:
    """With and without fast accumulation."""
    torch.manual_seed(k)
    a, b = (DATA[data](torch.randn(rows, k, device=device)).bfloat16() for _ in range(2))
    (cast_a, scale_a), (cast_b, scale_b) = cast(a), cast(b)
    exact = a.double() @ b.double().t()
    summed = (cast_a.double() * scale_a) @ (cast_b.double() * scale_b).t()
    results = []
    for fast in (False, True):
        found = torch._scaled_mm(
            cast_a, cast_b.t(), scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=fast
        ).double()
        shrunk = 100 * (1 - float((found * summed).sum() / summed.square().sum()))
        decibel = decibels(exact, summed), decibels(summed, found), decibels(exact, found)
        results.append(Result(data, k, fast, *decibel, shrunk))
    return results


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Print the table; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small matmuls on the CPU")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args(arguments)
    tiny = given.tiny or not torch.cuda.is_available()
    rows, lengths, device = (TINY_ROWS, TINY_LENGTHS, "cpu") if tiny else (ROWS, LENGTHS, "cuda")
    print(f"{'':18} {'K':>6} {'accumulation':>12} {'cast':>6} {'sum':>6} {'all':>6} {'shrunk':>8}")
    results = [r for data in DATA for k in lengths for r in measure(data, rows, k, device)]
    for r in results:
        name = "fast" if r.fast else "FP32"
        print(f"{r.data:18} {r.k:6} {name:>12} {r.cast:6.1f} {r.sum:6.1f} {r.all:6.1f} {r.shrunk:7.3f}%")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in results]}, indent=1))
    return results


if __name__ == "__main__":
    main()
