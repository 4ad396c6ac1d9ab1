"""Compile the kernels of random regions for Hopper, without a GPU.

    python tests/compile_regions.py 0 30        seeds; prints how many made a cubin, exits with 1 if one did not

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import regions
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels import emit, generated
from fp8compile.kernels.schedule import Schedule
from fp8compile.kernels.spec import Region

POINTERS = {
    "bool": "*i1",
    "int64": "*i64",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}
HOPPER = GPUTarget("cuda", 90, 32)


def cubin(region: Region, schedule: Schedule) -> bytes:
    """The kernel as machine code of sm_90."""
    dtypes = {f"x{i.tensor}": i.dtype for part in region.parts for i in part.inputs}
    dtypes |= {f"y{i}": buffer.dtype for i, buffer in enumerate(region.buffers)}
    signature = {a: POINTERS[dtypes[a]] if a in dtypes else "i32" for a in emit.arguments(region)}
    source = ASTSource(generated.kernel_of(region, schedule), signature, {})
    options = {"num_warps": schedule.warps}
    return triton.compile(source, target=HOPPER, options=options).asm["cubin"]


def main(first: int, last: int) -> None:
    failed = 0
    for seed in range(first, last):
        draw = regions.draw(seed)
        try:
            assert len(cubin(draw.region, draw.schedule)) > 0
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{last - first - failed} of {last - first} compiled")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
