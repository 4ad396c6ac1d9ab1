"""Compile the kernels that measure casts for Hopper, without a GPU, in some of their forms; prints how many compiled.

    python tests/support/compile_watching.py [--verbose]

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels.casts import measure_casts
from fp8compile.kernels.casts.loss_sums import LINE, ROW, SATURATED

HOPPER = GPUTarget("cuda", 90, 32)
EXTREMES = {"x": "", "scale": "*fp32", "found": "*i64", "count": "i64"}
EXTREMES_VALUES = {"BLOCK": measure_casts.BLOCK, "PROGRAMS": measure_casts.PROGRAMS}
LINES = {"x": "", "scale": "*fp32", "row_amax": "", "largest": "*fp32", "row_sums": "*fp32", "column_sums": "*fp32"} | (
    dict.fromkeys(("batches", "rows", "columns", "x_batch", "x_row", "x_column"), "i32")
    | dict.fromkeys(("scale_batch", "scale_row", "scale_column", "height", "width"), "i32")
)
LINES_VALUES = {
    "OF_ROW": len(ROW), "OF_LINE": len(LINE),
    "TILE_ROWS": measure_casts.TILE_ROWS, "TILE_COLUMNS": measure_casts.TILE_COLUMNS,
}  # fmt: skip
PART = {"TILE_ROWS": measure_casts.TILE_ROWS // 4}  # of a tile: ptxas takes a quarter of the time


def forms() -> Iterator[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, signature, compile-time values) of what is launched."""
    for dtype, counted in (("*bf16", True), ("*fp16", False), ("*fp32", True)):
        values = EXTREMES_VALUES | {"LIMIT": SATURATED["e4m3"], "COUNTED": counted}
        yield measure_casts.find_extremes, EXTREMES | {"x": dtype}, values
    for dtype, format, along in (("*bf16", "e4m3", "x_row"), ("*fp32", "e5m2", "x_column")):
        values = LINES_VALUES | PART | {"LIMIT": SATURATED[format], "E5M2": format == "e5m2", along: 1}
        yield measure_casts.add_lines, LINES | {"x": dtype, "row_amax": dtype}, values


def main(verbose: bool) -> None:
    compiled = total = 0
    for kernel, signature, values in forms():
        total += 1
        source = ASTSource(kernel, signature | dict.fromkeys(values, "constexpr"), values)
        asm = triton.compile(source, target=HOPPER, options=measure_casts.OPTIONS).asm
        compiled += len(asm["cubin"]) > 0
        if verbose:
            ptx = str(asm["ptx"])
            print(
                kernel.__name__,
                signature["x"],
                {op: ptx.count(op) for op in ("ld.global", "st.global", "div.", "fma", "bar.sync")},
            )
    print(f"{compiled} of {total} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
