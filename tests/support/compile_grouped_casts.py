"""Compile the kernels that cast groups of tokens for Hopper, without a GPU; prints how many compiled.

    python tests/support/compile_grouped_casts.py [--verbose]

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels.casts import grouped_cast

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "index": "*i64",
    "amax": "*fp32",
    "offs": "*i32",
    "data": "*fp8e4nv",
    "scales": "*fp32",
    "ends": "*i32",
    "amaxes": "*i32",
}
ALIGNED = ("columns", "width", "length")  # multiples of 16, as pointers are of bytes
INSTRUCTIONS = r"[ls][td]\.(?:global|shared)[\w.]*|bar\.sync|cvt\.rn\.satfinite|div\.rn"


def forms() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(kernel, dtype, compile-time values and warps) of what is launched."""
    piece = {"PIECE": grouped_cast.PIECE}
    yield grouped_cast.find_amaxes, "*bf16", grouped_cast.FIND | piece | {"GATHERED": False, "GROUPS": 1024}
    yield grouped_cast.join_amaxes, "*bf16", piece | {"GROUPS": 1024, "num_warps": 4}
    forms_of_casts = ("*bf16", False, True, 16), ("*bf16", False, False, 16), ("*fp32", True, False, 1024)
    for dtype, exact, one, groups in forms_of_casts:
        values = piece | {"ONE_SCALE": one, "POWER_OF_TWO": exact, "ASSEMBLED": True, "GATHERED": one, "GROUPS": groups}
        yield grouped_cast.cast_pieces, dtype, grouped_cast.CAST | values


def main(verbose: bool) -> None:
    compiled = total = 0
    for kernel, dtype, values in forms():
        total += 1
        warps = {"num_warps": values.pop("num_warps")}
        types = {n: dtype if n == "x" else TYPES.get(n, "i32") for n in kernel.arg_names if n not in values}
        aligned = [n for n, kind in types.items() if kind.startswith("*") or n in ALIGNED]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = ASTSource(kernel, types | dict.fromkeys(values, "constexpr"), values, attributes)
        asm = triton.compile(source, target=HOPPER, options=warps).asm
        compiled += len(asm["cubin"]) > 0
        if verbose:
            print(kernel.__name__, dtype, dict(Counter(re.findall(INSTRUCTIONS, str(asm["ptx"])))))
    print(f"{compiled} of {total} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
