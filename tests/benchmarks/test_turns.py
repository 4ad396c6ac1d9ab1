"""A process has the machine alone: others, and whatever they have started, stand still meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.turns import Turns, with_descendants

ROOT = Path(__file__).parents[2]
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


MEETS = """
import sys, time
from pathlib import Path
from benchmarks.harness.turns import Turns
turns = Turns(Path(sys.argv[1]))
if sys.argv[2] == "misses":
    turns.miss("a · b/c")
else:
    print(turns.meet("a · b/c", 2, 30.0))
    for _ in turns.by_turns(3):
        with open(f"{sys.argv[1]}/order", "a") as file:
            file.write(sys.argv[2])
        time.sleep(0.05)
"""


def meeting(folder: Path, *names: str) -> list[str]:
    """What processes of these names print that come to one meeting."""
    command = [sys.executable, "-c", MEETS, str(folder)]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True, cwd=ROOT) for name in names]
    return [process.communicate(timeout=60)[0].strip() for process in started]


def test_those_who_meet_have_the_gpu_by_turns(tmp_path: Path) -> None:
    assert meeting(tmp_path, "x", "y") == ["True", "True"]
    assert (tmp_path / "order").read_text() in ("xyxyxy", "yxyxyx")


def test_who_fails_is_not_waited_for(tmp_path: Path) -> None:
    assert meeting(tmp_path, "x", "misses") == ["False", ""]
    assert (tmp_path / "order").read_text() == "xxx"


def test_who_does_not_come_is_not_waited_for_long(tmp_path: Path) -> None:
    assert not Turns(tmp_path).meet("somewhere", 2, 0.2)
    assert not Turns(tmp_path).meet("elsewhere", 2, 0.0)
