"""Compile the kernel of matmuls with few rows for Hopper, without a GPU; prints how many forms compiled.

    python tests/support/compile_few_rows.py [--verbose]

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

from fp8compile.kernels.matmul.few_rows import STAGES, WARPS, few_rows, launch_of

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "a": "*fp8e4nv", "b": "*fp8e4nv", "scale_a": "*fp32", "scale_b": "*fp32", "bias": "*bf16", "out": "*bf16",
    "partial": "*fp32", "arrived": "*i32",
}  # fmt: skip
FORMS = (  # M, N, K, granularities, bias, fast accumulation
    (1, 2048, 8192, "row", "row", False, False),
    (64, 16384, 2048, "row", "tensor", True, True),
    (17, 1000, 112, "tensor", "row", True, False),
)
INSTRUCTIONS = r"[ls][td]\.(?:global|shared)[\w.]*|cp\.async[\w.]*|wgmma\.mma_async[\w.]*|atom[\w.]*"


def main(verbose: bool) -> None:
    compiled = 0
    for form in FORMS:
        launch = launch_of(*form)
        attributes = {(few_rows.arg_names.index(name),): [["tt.divisibility", 16]] for name in TYPES}
        types = TYPES | dict.fromkeys(launch.constants, "constexpr")
        source = ASTSource(few_rows, types, launch.constants, attributes)
        asm = triton.compile(source, target=HOPPER, options={"num_warps": WARPS, "num_stages": STAGES}).asm
        is_of_matmul_unit = "wgmma" in str(asm["ptx"])
        compiled += len(asm["cubin"]) > 0 and is_of_matmul_unit
        if verbose:
            print(form, dict(Counter(re.findall(INSTRUCTIONS, str(asm["ptx"])))))
    print(f"{compiled} of {len(FORMS)} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
