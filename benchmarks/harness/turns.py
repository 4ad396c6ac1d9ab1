"""One GPU that several processes compile on, and each of which has it alone for a moment, to be timed.

A process that joins leaves its number in a folder. Who wants the GPU alone takes the folder's lock, stops the others
(SIGSTOP) with the processes that they have started, and lets them go on afterwards: compilers' workers do not use the
GPU, but the cores that tell it what to do. How long that was is written down, so that the others can leave it out of
what they measure meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK, TURNS = "lock", "turns"


@dataclass(frozen=True)
class Turns:
    """The processes that share a GPU; `folder` is theirs."""

    folder: Path

    def join(self) -> None:
        """Be among those who are stopped when another has the GPU alone."""
        with self._locked():
            (self.folder / f"{os.getpid()}.process").touch()

    def leave(self, process: int) -> None:
        (self.folder / f"{process}.process").unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the GPU alone."""
        with self._locked():
            start = time.monotonic()
            self._send(signal.SIGSTOP)
            try:
                time.sleep(0.05)  # what the others had queued ends
                yield
            finally:
                self.let_all_go()
                with (self.folder / TURNS).open("a") as file:
                    file.write(f"{os.getpid()} {start} {time.monotonic()}\n")

    def let_all_go(self) -> None:
        """Continue all: after a turn, or in place of a process that died in one."""
        self._send(signal.SIGCONT)

    def stopped(self, start: float, end: float) -> float:
        """Seconds between two times of the monotonic clock in which another had the GPU alone."""
        file = self.folder / TURNS
        turns = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        others = [(float(a), float(b)) for process, a, b in turns if int(process) != os.getpid()]
        return sum(max(0.0, min(b, end) - max(a, start)) for a, b in others)

    def _send(self, what: signal.Signals) -> None:
        others = [int(file.stem) for file in self.folder.glob("*.process")]
        for process in with_descendants([x for x in others if x != os.getpid()]):
            if process == os.getpid():  # one of the others has started this one
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, what)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file gives the lock back, and so does dying


def with_descendants(processes: list[int]) -> list[int]:
    """Return these processes and their descendants, as far as Linux lists them."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = file.read_text().rpartition(")")[2].split()[1]  # behind the name, which may hold anything
            children.setdefault(int(parent), []).append(int(file.parent.name))
    found = list(processes)
    for process in found:
        found += [x for x in children.get(process, []) if x not in found]
    return found
