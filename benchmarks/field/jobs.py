"""Rows of the field suite side by side: several to a GPU while they compile, each in processes of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.field.models.task import FieldModel
from benchmarks.harness.columns import Row
from benchmarks.harness.peers import LeftOutError
from benchmarks.harness.processes import Case, Clock, begin, end, outcome
from benchmarks.harness.runs import measured
from benchmarks.harness.turns import Turns


@dataclass
class Job:
    """A row that is being measured: its systems one after the other; `rows` are those of systems that are done."""

    model: FieldModel
    gpu: int
    waiting: list[str]
    system: str = ""
    rows: list[Row] = field(default_factory=list)
    process: Any = None
    answer: Any = None
    cache: str = ""
    began: float = 0.0


class Jobs:
    """Begins rows where there is memory, ends them, and hands the rows of each to `done`.

    Systems of one row run one after the other on one GPU. A row is begun on the GPU that has least to do, unless those
    on it and this one may need more than `given.gib`.
    """

    def __init__(
        self, measure: Callable[..., Any], given: argparse.Namespace, start: str, shared: Path, clock: Clock,
        done: Callable[[list[Row]], None],
    ):  # fmt: skip
        self.measure, self.given, self.start, self.shared, self.clock = measure, given, start, shared, clock
        self.done, self.running = done, list[Job]()
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.numbers = numbers if numbers != [""] else [str(i) for i in range(given.gpus)]
        self.turns = [Turns(shared / f"gpu{i}") for i in range(given.gpus)]

    def run(self, models: Sequence[FieldModel], systems: Sequence[str]) -> None:
        """Measure all; what the time does not suffice for is left, and is no row."""
        waiting = list(models)
        try:
            while (waiting or self.running) and self.clock.left > 0:
                self._begin_rows(waiting, systems)
                self._wait()
        finally:
            for job in self.running:
                self._stop(job)

    def _begin_rows(self, waiting: list[FieldModel], systems: Sequence[str]) -> None:
        while len(self.running) < self.given.jobs:
            found = self._next(waiting)
            if found is None or self.clock.left < self.clock.longest:
                return
            model, gpu = found
            waiting.remove(model)
            job = Job(model, gpu, list(systems))
            self.running.append(job)
            self._begin(job)

    def _next(self, waiting: Sequence[FieldModel]) -> tuple[FieldModel, int] | None:
        """The first row for which a GPU has memory, and the GPU that has least to do."""
        used = [sum(job.model.gib for job in self.running if job.gpu == gpu) for gpu in range(self.given.gpus)]
        for model in waiting:
            free = [gpu for gpu, gib in enumerate(used) if gib == 0 or gib + model.gib <= self.given.gib]
            if free:
                return model, min(free, key=lambda gpu: sum(job.gpu == gpu for job in self.running))
        return None

    def _begin(self, job: Job) -> None:
        job.cache = tempfile.mkdtemp(dir=self.shared)
        job.system = job.waiting.pop(0)
        case = Case(job.model.name, job.system, self.given.tiny, cache=job.cache)
        job.began = time.monotonic()
        measure = partial(self.measure, turns=self.turns[job.gpu], gpu=self.numbers[job.gpu])
        job.process, job.answer = begin(measure, case, self.start)

    def _wait(self) -> None:
        """Go on with every job whose system is done or has run too long."""
        answers = [job.answer for job in self.running]
        ready = wait(answers, timeout=min(1.0, max(self.clock.left, 0.0))) if answers else []
        for job in list(self.running):
            late = time.monotonic() - job.began > self.given.limit
            if job.answer in ready or late:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        """Note a system's row; begin the next system, or the row is done."""
        model, system = job.model.name, job.system
        row = measured(lambda case: self._outcome(job), Case(model, system))
        taken = time.monotonic() - job.began
        self.clock.longest = max(self.clock.longest, 2 * taken if job.waiting else taken)
        self._stop(job)
        job.rows.append(row)
        left_out = bool(row.get("left_out"))
        if job.waiting and not left_out:
            self._begin(job)
            return
        job.rows += [Row(model, name, row.note, dict(row.figures)) for name in job.waiting]
        self.running.remove(job)
        self.done(job.rows)

    def _outcome(self, job: Job) -> dict[str, Any]:
        if not job.answer.poll():
            return {"note": f"stopped: it ran for {self.given.limit:.0f} s", "too_long": True}
        try:
            return outcome(job.answer)
        except LeftOutError as why:
            return {"note": str(why), "left_out": True}

    def _stop(self, job: Job) -> None:
        """End a job's process, which may have had the GPU alone."""
        if job.process is None:
            return
        if job.process.is_alive() and not job.answer.poll():
            job.process.kill()
        end(job.process)
        turns = self.turns[job.gpu]
        turns.leave(job.process.pid)
        if job.process.exitcode:
            turns.let_all_go()
        shutil.rmtree(job.cache, ignore_errors=True)
        job.process = None
