"""Generated kernels compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "support" / "compile_regions.py"


def test_random_regions_compile(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    # 1024: minutes of ptxas, and no operator of its own; 298 and 426 cast one number, and zeros, four at a time;
    # -10037: rows of 1000 in groups of 64, reduced: whole, they are more than the shared memory
    command = [sys.executable, str(SCRIPT), "1025", "1045", "298", "426", "-10037"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "23 of 23 compiled"
