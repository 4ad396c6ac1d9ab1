"""Compile the kernels of random regions for Hopper, without a GPU.

    python tests/support/compile_regions.py 0 30 298
        seeds 0 to 29, and 298 (-298: the large region of that seed); prints how many made a cubin as it should be,
        exits with 1 if one did not

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import regions
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.emit.kernel import arguments
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region

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
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]
# A cast of two numbers that is put beside one before, unless that is RZ. ptxas 12.8 does so also where it has dropped
# the one before (`kernels/codegen/source/helpers.py`); generated kernels leave it nothing to put together.
JOINED = re.compile(r"F2FP\.SATFINITE\.E[0-9]M[0-9]\.F32\.PACK_AB_MERGE_C [^;]*, R[0-9]+[^;,]*;")


def compiled(region: Region, schedule: Schedule) -> Any:
    """Return the kernel compiled for sm_90, its tensors aligned as a GPU's are. Raises where it needs more shared
    memory than a program can have."""
    dtypes = {f"x{t}": i.dtype for part in region.parts for i in part.inputs for t in i.tensors}
    dtypes |= {f"y{i}": buffer.dtype for i, buffer in enumerate(region.buffers)}
    signature = {a: POINTERS[dtypes[a]] if a in dtypes else "i32" for a in arguments(region)}
    aligned = {(i,): ALIGNED for i, a in enumerate(signature) if a in dtypes}
    source = ASTSource(generated.kernel_of(region, schedule), signature, {}, aligned)
    options = {"num_warps": schedule.warps}
    kernel = triton.compile(source, target=HOPPER, options=options)
    assert kernel.metadata.shared <= choose_schedule.MOST_SHARED, f"{kernel.metadata.shared} bytes of shared memory"
    return kernel


def instructions(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout


def main(first: int, last: int, *more: int) -> None:
    seeds = [*range(first, last), *more]
    failed = 0
    for seed in seeds:
        draw = regions.draw(abs(seed), large=seed < 0)
        try:
            joined = JOINED.findall(instructions(compiled(draw.region, draw.schedule).asm["cubin"]))
            assert not joined, joined
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{len(seeds) - failed} of {len(seeds)} compiled")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
