"""Kernels compile for Hopper, on a machine without a GPU: generated regions, optimizer steps, the softmax of chunked
losses, those that measure casts, those that cast groups of tokens, and matmuls of few rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_for_hopper.py"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script printed, in a process without the interpreter."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("regions", "7 of 7 compiled"),
        ("softmax", "5 of 5 compiled"),
        ("updates", "4 compiled"),
        ("watching", "5 of 5 compiled"),
        ("few rows", "3 of 3 compiled"),
        ("grouped casts", "5 of 5 compiled"),
        ("grouped rows", "2 of 2 compiled"),
    ],
)
def test_all_kernels_compile(printed: dict[str, str], script: str, wanted: str) -> None:
    assert printed[script].splitlines()[-1] == wanted  # behind what Triton 3.9 warns of
