"""Compile the kernels of chunked losses for Hopper, without a GPU, in their forms; prints how many compiled.

    python tests/support/compile_softmax.py [--verbose]     with it, in all forms

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels.loss import softmax_gradient, turned_codes

HOPPER = GPUTarget("cuda", 90, 32)
SIGNATURE = {
    "index": "*i64", "weights": "*fp32", "chosen": "*fp32", "codes": "*u8", "scales": "*fp32", "stride": "i32",
    "classes": "i32", "width": "i32", "code_width": "i32",
    "inner": "fp32", "outer": "fp32", "GRADIENT": "constexpr", "WEIGHTED": "constexpr", "CURVE": "constexpr",
    "EVERY_TERM": "constexpr", "ASSEMBLED": "constexpr", "BLOCK": "constexpr",
}  # fmt: skip
ALIGNED = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 4, 5, 6, 8, 9)}  # all but the number of classes
NAMES = ("GRADIENT", "WEIGHTED", "codes", "CURVE", "EVERY_TERM")
FORMS = [
    (*all_three, *rest)
    for all_three in ((False,) * 3, (True,) * 3)
    for rest in itertools.product(("none", "capped"), (False, True))
]
TURN = {
    "codes": "*u8", "turned": "*u8", "rows": "i32", "width": "i32", "length": "i32", "pitch": "i32",
    "ROWS": "constexpr", "COLUMNS": "constexpr",
}  # fmt: skip
DTYPES = ("bf16", "fp16", "fp32")
KERNELS = {(DTYPES[i % 3], form) for i, form in enumerate(FORMS)} | {(dtype, FORMS[-1]) for dtype in DTYPES}
SOME = {
    ("bf16", FORMS[0]),
    ("fp16", FORMS[1]),
    ("fp32", FORMS[6]),
    ("bf16", FORMS[7]),
    ("fp32", FORMS[7]),
}  # each branch


def main(verbose: bool) -> None:
    compiled = 0
    kernels = KERNELS if verbose else SOME
    for dtype, form in sorted(kernels):
        values = dict(zip(NAMES, form, strict=True)) | {"BLOCK": softmax_gradient.BLOCK, "ASSEMBLED": True}
        signature, aligned = {"logits": f"*{dtype}"} | SIGNATURE, dict(ALIGNED)
        if values.pop("codes"):
            source = ASTSource(softmax_gradient.softmax_gradient, signature, values, aligned)
        else:
            for name, place in (("codes", 4), ("scales", 5)):
                values[name], signature[name] = None, "constexpr"
                del aligned[place,]
            source = ASTSource(softmax_gradient.softmax_gradient, signature, values, aligned)
        asm = triton.compile(source, target=HOPPER, options={"num_warps": softmax_gradient.WARPS}).asm
        assert len(asm["cubin"]) > 0
        compiled += 1
        if verbose:
            ptx = str(asm["ptx"])
            print(dtype, form, {op: ptx.count(op) for op in ("ld.global", "st.global", "ex2", "bar.sync")})
    values = {"ROWS": turned_codes.ROWS, "COLUMNS": turned_codes.COLUMNS}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 3, 4, 5)}
    source = ASTSource(turned_codes.turn_tile, TURN, values, aligned)
    assert len(triton.compile(source, target=HOPPER, options={"num_warps": turned_codes.WARPS}).asm["cubin"]) > 0
    print(f"{compiled} of {len(kernels)} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
