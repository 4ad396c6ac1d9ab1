"""A process has the machine alone: others, and whatever they have started, stand still meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.turns import Turns, with_descendants

COUNTS = """
import subprocess, sys, time
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2], sys.argv[1] + ".child"])
while True:
    with open(sys.argv[1], "a") as file:
        file.write(".")
    time.sleep(0.01)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the list of processes of Linux")


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def wait_for_more(file: Path, than: int) -> None:
    end = time.monotonic() + 30
    while size(file) <= than:
        assert time.monotonic() < end, f"{file.name} stands still"
        time.sleep(0.01)


def test_others_and_their_children_are_stopped(tmp_path: Path) -> None:
    files = [tmp_path / "counts", tmp_path / "counts.child"]
    started = subprocess.Popen([sys.executable, "-S", "-c", COUNTS, str(files[0]), COUNTS])
    (tmp_path / f"{started.pid}.process").touch()
    processes: list[int] = []
    try:
        for file in files:
            wait_for_more(file, 0)
        processes = with_descendants([started.pid])
        assert len(processes) == 2
        with Turns(tmp_path).alone():
            before = [size(file) for file in files]
            time.sleep(0.2)
            assert [size(file) for file in files] == before
        for file, then in zip(files, before, strict=True):
            wait_for_more(file, then)
    finally:
        for process in processes or [started.pid]:
            os.kill(process, 9)
        started.wait()
