"""Compile optimizer kernels for Hopper, without a GPU; prints how many instructions each has.

    python tests/compile_updates.py [--verbose]

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from updates import adam

from fp8compile.kernels import update_launch
from fp8compile.kernels.emit_update import UpdateSchedule, columns
from fp8compile.kernels.update_spec import Update

HOPPER = GPUTarget("cuda", 90, 32)
SIGNATURE = {"table": "*i64", "sizes": "*i64", "blocks": "*i32", "scalars": "*fp32"} | {
    "TENSORS": "constexpr",
    "NUMBERS": "constexpr",
}
ALIGNED = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]], (2,): [["tt.divisibility", 16]]}
UPDATES = [
    adam("log", "log/stochastic", "bfloat16", "bfloat16"),
    adam("log", "log", "split", "bfloat16"),
    adam("e4m3", "e5m2/stochastic", "stochastic", "bfloat16"),
    adam("e4m3/linear", "e4m3/linear", "bfloat16", "bfloat16"),
    adam("float32", "float32", "float32", "float32"),
]


def assembly(update: Update, schedule: UpdateSchedule) -> dict[str, bytes | str]:
    """PTX and machine code of the kernel for sm_90."""
    widths = {"TENSORS": len(columns(update)), "NUMBERS": len(update.scalars)}
    source = ASTSource(update_launch.kernel_of(update, schedule, "cuda"), SIGNATURE, widths, ALIGNED)
    return triton.compile(source, target=HOPPER, options=schedule.options("cuda")).asm


def main(verbose: bool) -> None:
    for update in UPDATES:
        asm = assembly(update, update_launch.SCHEDULE)
        assert len(asm["cubin"]) > 0
        if verbose:
            ptx = str(asm["ptx"])
            lines = [line for line in ptx.splitlines() if line.startswith("\t") and line.strip()[:1].isalpha()]
            per = update_launch.SCHEDULE.groups * 128 / (32 * update_launch.SCHEDULE.warps)
            print(update_launch.kernel_name(update, update_launch.SCHEDULE), len(lines), len(lines) / per)
    print(f"{len(UPDATES)} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
