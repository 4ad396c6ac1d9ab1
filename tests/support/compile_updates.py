"""Compile optimizer kernels for Hopper, without a GPU; prints how many machine instructions each has an element.

    python tests/support/compile_updates.py [--verbose]

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from updates import adam, unscaled

from fp8compile.kernels.optimizer import update_launch
from fp8compile.kernels.optimizer.emit_update import UpdateSchedule, columns
from fp8compile.kernels.optimizer.update_spec import Update

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
    adam("e4m3", "e4m3", "bfloat16", "bfloat16"),
    adam("e4m3/linear", "e4m3/linear", "bfloat16", "bfloat16"),
    adam("float32", "float32", "float32", "float32"),
    unscaled(adam("log", "log/stochastic", "bfloat16", "bfloat16")),
]
MIXED = [  # what those have, in as few
    adam("log", "float32", "split", "bfloat16"),
    adam("e4m3/linear", "e5m2/stochastic", "stochastic", "bfloat16"),
    unscaled(adam("e4m3", "log/stochastic", "bfloat16", "bfloat16")),
    adam("float32", "float32", "float32", "float32"),
]


def assembly(update: Update, schedule: UpdateSchedule) -> dict[str, bytes | str]:
    """PTX and machine code of the kernel for sm_90."""
    widths = {"TENSORS": len(columns(update)), "NUMBERS": len(update.scalars)}
    source = ASTSource(update_launch.kernel_of(update, schedule, "cuda"), SIGNATURE, widths, ALIGNED)
    return triton.compile(source, target=HOPPER, options=schedule.options("cuda")).asm


def instructions_in_loop(cubin: bytes) -> int:
    """Machine instructions of the longest loop: of a tile of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    longest = count = 0
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", line):
            count += 1
            if branch := re.search(r"\bBRA\b.*?(\.L_x_\d+)", line):
                longest = max(longest, count - labels.get(branch[1], count))
    return longest


def main(verbose: bool) -> None:
    updates = UPDATES if verbose else MIXED
    for update in updates:
        # a quarter of a tile takes ptxas a third of the time; a whole one of that which does most
        is_whole = verbose or update.skip is not None
        schedule = update_launch.schedule_of(update)
        schedule = schedule if is_whole else replace(schedule, groups=4)
        cubin = assembly(update, schedule)["cubin"]
        assert isinstance(cubin, bytes)
        if verbose:
            elements = schedule.groups * 128 / (32 * schedule.warps)  # of a tile of a thread
            print(f"{instructions_in_loop(cubin) / elements:6.1f} {update_launch.kernel_name(update, schedule)}")
    print(f"{len(updates)} compiled")


if __name__ == "__main__":
    main("--verbose" in sys.argv)
