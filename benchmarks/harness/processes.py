"""Processes that measure: each begins with nothing compiled or allocated, and is stopped when it takes too long."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters  # of graphs; torch.compiler.reset() leaves them

import fp8compile.plan.store
from benchmarks.harness.measuring import machine
from benchmarks.harness.peers import LeftOutError

# Where compilers keep what they have compiled, below one folder
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}
FOR_COMPILING = 0.6


@dataclass(frozen=True)
class Case:
    """One system on one model.

    cache: the folder of compile caches; warm: whether everything has been compiled into it; compile_only: measure
    nothing once it has.
    """

    model: str
    system: str
    tiny: bool = False
    cache: str = ""
    warm: bool = False
    compile_only: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"


class FailedError(RuntimeError):
    """What went wrong in another process, in one line."""


Measure = Callable[[Case], dict[str, Any]]


class Clock:
    """How much of the time is over, and the longest that anything has taken so far."""

    def __init__(self, seconds: float):
        self.start, self.seconds, self.longest = time.monotonic(), seconds, 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def __enter__(self) -> None:
        self.began = self.spent

    def __exit__(self, *_: object) -> None:
        self.longest = max(self.longest, self.spent - self.began)


def in_this_process(measure: Measure, case: Case) -> dict[str, Any]:
    forget()
    try:
        return measure(case)
    finally:
        forget()


def forget() -> None:
    """Leave nothing behind that the next system could find."""
    torch.compiler.reset()
    counters.clear()
    fp8compile.plan.store.reset()
    gc.collect()


def isolated(measure: Measure, case: Case, start: str, seconds: float) -> dict[str, Any]:
    """What `measure` returns in a process of its own, which is stopped when it takes longer."""
    process, answer = begin(measure, case, start)
    try:
        if not answer.poll(max(seconds, 0.1)):
            process.kill()
            raise LeftOutError(f"stopped after {seconds:.0f} s")
        return outcome(answer)
    finally:
        end(process)


def precompile(measure: Measure, cases: Sequence[Case], start: str, jobs: int, clock: Clock) -> None:
    """Fill the cache that the cases share, several at a time; what fails will fail again, and be told then.

    Timing has what is left of the time, and compiles what is missing: this takes `FOR_COMPILING` of it at most.
    """
    waiting = [replace(case, compile_only=True) for case in reversed(cases)]
    running: dict[Any, Any] = {}
    while (waiting or running) and (left := FOR_COMPILING * clock.seconds - clock.spent) > 0:
        while waiting and len(running) < jobs:
            process, answer = begin(measure, waiting.pop(), start)
            running[answer] = process
        for answer in wait(list(running), timeout=left):
            end(running.pop(answer))
    for process in running.values():
        process.kill()
    for chosen in Path(cases[0].cache).rglob("*.best_config"):  # Inductor's choices, made while others used the GPU
        chosen.unlink()
    print(f"compiled within {clock.spent:.0f} s, {jobs} at a time", flush=True)


def first_process(start: str) -> tuple[str, dict[str, Any]]:
    """How processes are to begin, and what one of them says of the machine: a fork may not be able to use the GPU."""
    case = Case("", "")
    try:
        return start, isolated(about_machine, case, start, 60.0)
    except (FailedError, LeftOutError) as error:
        print(f"{start}: {error}; processes are spawned", flush=True)
    try:
        return "spawn", isolated(about_machine, case, "spawn", 60.0)
    except (FailedError, LeftOutError) as error:
        raise SystemExit(f"this needs a GPU ({error}); --tiny runs anywhere") from None


def about_machine(case: Case) -> dict[str, Any]:
    torch.zeros(1, device=case.device)
    return {**machine()}


def begin(measure: Measure, case: Case, start: str) -> tuple[Any, Any]:
    """A process that measures, and where its answer will come from."""
    context: Any = multiprocessing.get_context(start)
    answer, its_end = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(measure, case, its_end))
    process.start()
    its_end.close()
    return process, answer


def outcome(answer: Connection) -> dict[str, Any]:
    try:
        found = answer.recv()
    except EOFError:
        raise FailedError("its process died") from None
    if isinstance(found, BaseException):
        raise found
    return found


def end(process: Any) -> None:
    process.join(2.0)
    if process.is_alive():
        process.kill()
        process.join()


def work(measure: Measure, case: Case, answer: Connection) -> None:
    """What a system's process does."""
    if case.cache:
        os.environ.update({name: str(Path(case.cache, below)) for name, below in CACHES.items()})
    try:
        found: Any = measure(case)
    except LeftOutError as why:
        found = why
    except Exception as error:
        traceback.print_exc()
        found = FailedError(one_line(error))  # the error itself may not travel
    answer.send(found)
    answer.close()


@contextmanager
def folder() -> Iterator[str]:
    """A folder that is gone afterwards, whoever still writes to it."""
    path = tempfile.mkdtemp(prefix="benchmark-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def one_line(error: BaseException) -> str:
    if isinstance(error, FailedError):
        return str(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
