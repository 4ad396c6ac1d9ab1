"""What a contracted length costs that is no multiple of a cache line, beside the same filled up with zeros.

    python -m benchmarks.micro.contracted_lengths --json FILE    one GPU with FP8, less than a minute
    python -m benchmarks.micro.contracted_lengths --tiny    tiny shapes by the reference, on a CPU: no times

Rows of codes lie one after the other, so with a length that is a multiple of 16, which is what FP8 units want, a row
begins anywhere in a line of 128 bytes. Milliseconds of a [M, K] times b [N, K], transposed, both E4M3, BF16 results,
medians: K as it is, and filled up to the next multiple of 32, 64 and 128; by one scale a tensor, and one a row.

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.harness import runs
from benchmarks.harness.columns import Column, Row, figure, ratio
from benchmarks.harness.measuring import device_milliseconds, intervals
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.micro.matmul import SLEEP, operand
from fp8compile.formats import round_up
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers

SHAPES = {  # M, N, K
    "ViT-L, batch 64: grad_weight": (4096, 1024, 12608),
    "8208 tokens: grad_weight": (4096, 14336, 8208),
    "2064 tokens: grad_weight": (2048, 2048, 2064),
    "528 tokens: grad_weight": (4096, 4096, 528),
    "GPT-2's head: grad_input": (2048, 768, 50272),
    "SigLIP: down": (16384, 1152, 4304),
    "GPT-2 XL: up": (8192, 6400, 1600),
    "ViT's patches": (16384, 1536, 784),
}
TINY = (32, 48, 80)
AS_IT_IS = "as it is"
MULTIPLES = {AS_IT_IS: 1, "of 32": 32, "of 64": 64, "of 128": 128}
SCALES = ("tensor", "row")


def measure(case: Case) -> dict[str, Any]:
    """Return the milliseconds of one shape, its contracted length filled up to a multiple."""
    m, n, k = TINY if case.tiny else SHAPES[case.model]
    length = round_up(k, MULTIPLES[case.system])
    multiply = markers.scaled_mm if case.tiny else scaled_mm.scaled_mm
    figures: dict[str, Any] = {"m": m, "n": n, "k": length}
    for scales in SCALES:
        (a, of_a), (b, of_b) = (operand(rows, k, scales, case.device) for rows in (m, n))
        a, b = (_filled(x, length) for x in (a, b))
        call = partial(multiply, a, of_a, scales, b, of_b, scales, None, torch.bfloat16)
        call()
        figures[scales] = (
            statistics.median(intervals(call, 2, "cpu")) if case.tiny else device_milliseconds(call, 25, SLEEP)
        )
    return figures


def _filled(codes: torch.Tensor, length: int) -> torch.Tensor:
    """Return codes [rows, K] with zeros behind each row, up to this length."""
    whole = torch.zeros(codes.shape[0], length, dtype=torch.uint8, device=codes.device)
    whole[:, : codes.shape[1]] = codes.view(torch.uint8)
    return whole.view(codes.dtype)


COLUMNS: tuple[Column, ...] = (
    Column(f"{'M × N × K':>22}", lambda row, _: " × ".join(str(row.get(size)) for size in "mnk")),
    *(column for scales in SCALES for column in (figure(f"{scales}, ms", scales, ".3f"), ratio("faster", scales))),
)
BENCHMARK = Benchmark(
    "contracted_lengths",
    {name: list(MULTIPLES) for name in SHAPES},
    measure,
    COLUMNS,
    AS_IT_IS,
    axes=(("k", "contracted length"), ("row", "scales of rows, ms")),
    alone=False,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
