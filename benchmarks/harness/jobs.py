"""Systems side by side: several to a GPU while they compile, each in a process of its own, alone while it is timed."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.harness.columns import Row
from benchmarks.harness.peers import LeftOutError
from benchmarks.harness.processes import Case, Clock, begin, measured, outcome
from benchmarks.harness.turns import Turns

T = TypeVar("T", bound="Sized")
# as torch, CUDA and its libraries say it
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")
REAPED = 10.0  # seconds that a killed process may take to give back its GPU memory


class Sized(Protocol):
    """A model whose need of GPU memory is known before it runs."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def gib(self) -> float:
        """Return GiB that a system may need to train it."""
        ...


@dataclass
class Job:
    """One system on one model. gib: memory that is reckoned for it; is_second: it ran out of memory beside others."""

    model: Sized
    system: str
    gib: float
    is_second: bool = False
    gpu: int = 0
    process: Any = None
    answer: Any = None
    cache: str = ""
    began: float = 0.0


def interleaved(models: Sequence[T]) -> list[T]:
    """Return the models, those that need most memory and those that need least by turns: both run side by side."""
    left = sorted(models, key=lambda model: -model.gib)
    return [left.pop(0 if i % 2 == 0 else -1) for i in range(len(left))]


class Jobs:
    """Begins systems where there is memory, until the time is over; hands the row of each to `done`.

    A job begins on the GPU that has least to do, unless those on it and this one may need more than `given.gib`. One
    that runs out of memory beside others begins once more, and is then reckoned to need three times as much.
    """

    def __init__(
        self, measure: Callable[..., Any], given: argparse.Namespace, start: str, shared: Path, clock: Clock,
        done: Callable[[Row], None],
    ):  # fmt: skip
        self.measure, self.given, self.start, self.shared, self.clock = measure, given, start, shared, clock
        self.done, self.waiting, self.running = done, list[Job](), list[Job]()
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.numbers = numbers if numbers != [""] else [str(i) for i in range(given.gpus)]
        self.turns = [Turns(shared / f"gpu{i}") for i in range(given.gpus)]

    def run(self, cases: Iterable[tuple[Sized, str]]) -> None:
        """Measure all, in this order; what the time does not suffice for is left, and is no row."""
        self.waiting = [Job(model, system, model.gib) for model, system in cases]
        try:
            while (self.waiting or self.running) and self.clock.left > 0:
                self._begin_jobs()
                self._wait()
        finally:
            for job in self.running:
                self._stop(job, failed=True)

    def _begin_jobs(self) -> None:
        while len(self.running) < self.given.jobs and (job := self._next()) is not None:
            self.waiting.remove(job)
            self.running.append(job)
            self._begin(job)

    def _next(self) -> Job | None:
        """Return the first job for which a GPU has memory, and in it the GPU that has least to do."""
        used = [sum(job.gib for job in self.running if job.gpu == gpu) for gpu in range(self.given.gpus)]
        for job in self.waiting:
            free = [gpu for gpu, gib in enumerate(used) if gib == 0 or gib + job.gib <= self.given.gib]
            if free:
                job.gpu = min(free, key=lambda gpu: len(self._on(gpu)))
                return job
        return None

    def _on(self, gpu: int) -> list[Job]:
        return [job for job in self.running if job.gpu == gpu]

    def _begin(self, job: Job) -> None:
        job.cache = tempfile.mkdtemp(dir=self.shared)
        case = Case(job.model.name, job.system, self.given.tiny, cache=job.cache)
        job.began = time.monotonic()
        measure = partial(self.measure, turns=self.turns[job.gpu], gpu=self.numbers[job.gpu])
        job.process, job.answer = begin(measure, case, self.start)

    def _wait(self) -> None:
        """Finish every job that is done or has run too long."""
        answers = [job.answer for job in self.running]
        ready = wait(answers, timeout=min(1.0, max(self.clock.left, 0.0))) if answers else []
        for job in list(self.running):
            late = time.monotonic() - job.began > self.given.limit
            if job.answer in ready or late:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """Note a job's row; one that others left too little memory for waits again."""
        row = measured(lambda case: self._outcome(job), Case(job.model.name, job.system))
        self._stop(job, failed=not row.figures or bool(row.get("too_long")))
        row.figures["job_seconds"] = time.monotonic() - job.began
        self.running.remove(job)
        crowded = any(said in row.note for said in OUT_OF_MEMORY) and bool(self._on(job.gpu))
        if crowded and not job.is_second:
            self.waiting.insert(0, Job(job.model, job.system, min(3 * job.gib, self.given.gib), is_second=True))
        else:
            self.done(row)

    def _outcome(self, job: Job) -> dict[str, Any]:
        if not job.answer.poll():
            return {"note": f"stopped: it ran for {self.given.limit:.0f} s", "too_long": True}
        try:
            return outcome(job.answer)
        except LeftOutError as why:
            return {"note": str(why), "left_out": True}

    def _stop(self, job: Job, failed: bool) -> None:
        """End a job's process. One that failed may have had the GPU alone."""
        job.process.kill()  # nothing is left to be done: one that has answered would only take its time to exit
        job.process.join(REAPED)
        turns = self.turns[job.gpu]
        turns.leave(job.process.pid)
        if failed:
            turns.let_all_go()
        shutil.rmtree(job.cache, ignore_errors=True)
