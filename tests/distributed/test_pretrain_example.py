"""examples/pretrain.py on two processes: it learns, and goes on where it was stopped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PRETRAIN = Path(__file__).parents[2] / "examples" / "pretrain.py"


def losses(*arguments: str) -> dict[int, float]:
    """What it prints, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PRETRAIN)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Fp8Warning" not in done.stderr, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)", done.stdout)}


@pytest.mark.slow
def test_it_learns_and_resumes(tmp_path: Path) -> None:
    steps = ("--steps", "6")
    whole = losses(*steps, "--checkpoints", str(tmp_path), "--every", "4")
    shutil.rmtree(tmp_path / "step-00000006")
    (tmp_path / "step-00000005").mkdir()  # one that was not finished: it has no metadata
    assert losses(*steps, "--checkpoints", str(tmp_path)) == {6: whole[6]}
    assert whole[6] < whole[1] - 1
