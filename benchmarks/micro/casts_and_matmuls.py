"""The constants of the cost model, measured: FP8 and BF16 matmul rates, and that of casts as Inductor compiles them.

    python -m benchmarks.micro.casts_and_matmuls [--json FILE]          # one GPU with FP8, about a minute

Random data, medians of device times. `fp8compile/devices.py` holds the results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.measuring import milliseconds
from benchmarks.micro.matmul import operand
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers

SHAPES = [(16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (8192, 2048, 2048), (32768, 3584, 768)]
PAIRS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group(128)", "block(128)")}


def matmul_rates(m: int, n: int, k: int) -> dict[str, float]:
    """TFLOP/s of x[M, K] @ w[N, K]ᵀ, by granularity; BF16 beside it."""
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    work = 2e-9 * m * n * k
    rates = {"bf16": work / milliseconds(lambda: x @ w.t())}
    for name, (how_a, how_b) in PAIRS.items():
        a, scale_a = operand(m, k, how_a)
        b, scale_b = operand(n, k, how_b)
        args = (a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16)
        rates[name] = work / milliseconds(lambda args=args: scaled_mm.scaled_mm(*args))
    return rates


def cast_rates(rows: int, cols: int) -> dict[str, float]:
    """TB/s of compiled casts, counting the input twice (amax, then data) and every payload once."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    rates = {}
    for name, layouts in {
        "row": [("row", False)],
        "tensor, both layouts": [("tensor", False), ("tensor", True)],
    }.items():

        def cast(x: Tensor, layouts: list[tuple[str, bool]] = layouts) -> list[Tensor]:
            how = layouts[0][0]
            scale = markers.scale(markers.amax(x, how), "e4m3")
            return [scale, *(markers.quantize(x, scale, "e4m3", how, transpose) for _, transpose in layouts)]

        torch._dynamo.reset()
        compiled = torch.compile(cast)
        moved = rows * cols * (4 + 1) * len(layouts)
        rates[name] = moved / milliseconds(lambda compiled=compiled: compiled(x)) * 1e-9
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    results = {f"{m}x{n}x{k}": matmul_rates(m, n, k) for m, n, k in SHAPES}
    casts = {f"{r}x{c}": cast_rates(r, c) for r, c in [(16384, 4096), (16384, 14336), (32768, 3584)]}
    for title, table in (("matmul, TFLOP/s", results), ("cast, TB/s", casts)):
        print(title)
        for shape, rates in table.items():
            print(f"  {shape:20}", "  ".join(f"{name} {rate:.4g}" for name, rate in rates.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"matmul": results, "casts": casts}, indent=1))


if __name__ == "__main__":
    main()
