"""Compile the kernel of experts' rows for Hopper, without a GPU; prints how many forms compiled.

    python tests/support/compile_grouped_rows.py [--verbose]

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels.matmul.grouped_rows import BAND, HOW, TILE, rows_kernel

FORMS = (16, 1024)  # lanes that look groups up
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "a": f"tensordesc<fp8e4nv[{TILE['TM']}, {TILE['TK']}]>",
    "b": f"tensordesc<fp8e4nv[{TILE['TN']}, {TILE['TK']}]>",
    "scale_a": "*fp32", "scale_b": "*fp32", "offs": "*i32", "out": "*bf16",
}  # fmt: skip
INSTRUCTIONS = r"cp\.async\.bulk\.tensor|wgmma\.mma_async[\w.]*|[ls]t\.local"


def main(verbose: bool) -> None:
    compiled = 0
    for groups in FORMS:
        constants = {"PROGRAMS": 132, "GROUPS": groups, "BAND": BAND, **TILE}
        types = {name: TYPES.get(name, "i32") for name in rows_kernel.arg_names if name not in constants}
        pointers = [name for name, kind in types.items() if kind.startswith("*")]
        attributes = {(rows_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
        source = ASTSource(rows_kernel, types | dict.fromkeys(constants, "constexpr"), constants, attributes)
        asm = triton.compile(source, target=HOPPER, options=HOW).asm
        found = Counter(re.findall(INSTRUCTIONS, str(asm["ptx"])))
        compiled += len(asm["cubin"]) > 0 and any("wgmma" in i for i in found) and "cp.async.bulk.tensor" in found
        if verbose:
            print(groups, dict(found))
    print(f"{compiled} of {len(FORMS)} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
