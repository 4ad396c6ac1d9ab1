"""examples/pretrain.py on two processes: it learns, and goes on where it was stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TWICE = ROOT / "tests" / "support" / "pretrain_twice.py"


@pytest.mark.slow
def test_it_learns_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TWICE)]
    path = os.pathsep.join(filter(None, (str(ROOT / "examples"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Fp8Warning" not in done.stderr, done.stderr
    whole, resumed = (
        {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)", part)}
        for part in done.stdout.split("again")
    )
    assert whole.keys() == {1, 6}
    assert resumed == {6: whole[6]}
    assert whole[6] < whole[1] - 1
