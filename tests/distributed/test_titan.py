"""torchtitan's own trainer, on two processes without GPUs: FP8 trains as BF16 does, and resumes from a checkpoint."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = ("torchtitan", "torchdata", "tyro", "datasets", "spmd_types")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs torchtitan: pip install torchtitan",
    ),
]


def losses(folder: Path, config: str, *arguments: str) -> dict[int, str]:
    """What the trainer prints for each step."""
    program = [str(EXAMPLES / "titan_on_cpu.py"), "--module", "titan", "--config", config]
    settings = ["--debug.seed", "0", "--metrics.disable_color_printing", "--dump_folder", str(folder / "out")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *program, *settings, *arguments],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    if config == "bytes_fp8":
        assert "15 of 15 matmuls in FP8" in done.stdout + done.stderr
        assert "24 of 34 optimizer states in 8 bits" in done.stdout + done.stderr
    return {
        int(step): loss for step, loss in re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", done.stdout + done.stderr)
    }


def test_titan(tmp_path: Path) -> None:
    bf16 = losses(tmp_path, "bytes_bf16")
    checkpoints = ["--checkpoint.enable", "--checkpoint.interval", "3"]
    fp8 = losses(tmp_path, "bytes_fp8", *checkpoints)
    assert list(fp8) == list(bf16) == [1, 2, 3, 4, 5, 6]
    assert fp8 != bf16
    for step, loss in bf16.items():
        assert float(fp8[step]) == pytest.approx(float(loss), rel=0.005)  # FP8's noise over six steps
    assert float(bf16[6]) < float(bf16[1]) - 1
    resumed = losses(tmp_path, "bytes_fp8", *checkpoints, "--checkpoint.load_step", "3")
    assert resumed == {step: fp8[step] for step in (4, 5, 6)}
