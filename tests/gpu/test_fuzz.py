"""Some hundred random models on the GPU: the fuzzer's command, as a person runs it for thousands (`make fuzz`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from poison import poison_free_memory

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MODELS, SECONDS = 200, 500


def test_random_models(tmp_path: Path) -> None:
    """Two of three kernels really run, one in twenty models goes through Inductor too."""
    out = tmp_path / "models.jsonl"
    jobs = max(1, min(16, (os.cpu_count() or 1) - 1))
    command = [sys.executable, "-m", "tests.fuzz", "--device", "cuda", "--models", str(MODELS), "--jobs", str(jobs)]
    command += ["--share", "0.67", "--compiled-every", "20", "--seconds", str(SECONDS), "--out", str(out)]
    command += ["--shrink", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--shrink", "0"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(verdicts) > MODELS // 4
    skipped = [v["reasons"] for v in verdicts if v["status"] == "skipped"]  # eager refuses them, as some masks' strides
    assert len(skipped) <= len(verdicts) // 10, skipped
    assert sum(v["new"] for v in verdicts) > len(verdicts)
    assert sum(v["matmuls"] for v in verdicts) > len(verdicts)


@pytest.mark.parametrize("byte", [0xFF, 0x7E])
def test_memory_of_the_allocator_is_poisoned(byte: int) -> None:
    for size in (1 << 9, 1 << 14, 1 << 20, 1 << 23):
        poison_free_memory(byte, largest=1 << 24)  # each time: comparing leaves masks behind
        fresh = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert (fresh == byte).float().mean() > 0.9
