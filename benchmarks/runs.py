"""Runs a benchmark: each system on each model in a process of its own, within a time, and nothing measured is lost.

    --only *8B*,*gpt*     models, as patterns with commas            --systems fp8*,"BF16 compile"     likewise
    --seconds 250         no system is begun that may not end by then, and what runs on is stopped
    --jobs 4              first compile four systems at a time, into one cache; then time them one by one
    --json FILE           adds this run to FILE after every system       --picture FOLDER    time against peak memory

A system's process has an empty compile cache, so that its first step is a cold compile; with `--jobs` the caches are
warm, and compile times are not reported. Processes are forked from one that has imported everything and has not touched
the GPU (`--start spawn` begins each from nothing). `--tiny` runs everything in this process, on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not start CUDA

import torch
from columns import Column, Row, baseline_of, text_head, text_line
from measuring import machine
from peers import LeftOutError
from picture import Point, scatter
from torch._dynamo.utils import counters

import fp8compile.plans

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True)
class Case:
    """One system on one model.

    cache: the folder of compile caches, an empty one if none is named; warm: whether everything has been compiled into
    it; compile_only: measure nothing once it has.
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


Measure = Callable[[Case], dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """What is run: every system on every model, and how its figures are shown.

    baseline: the system with which others are compared; axes: figures of the picture, across and up, with their labels;
    imports: modules that models need, imported once for all.
    """

    name: str
    models: Sequence[str]
    systems: Sequence[str]
    measure: Measure
    columns: Sequence[Column]
    baseline: str
    axes: tuple[tuple[str, str], tuple[str, str]]
    imports: Sequence[str] = ()


# ---- the command line -----------------------------------------------------------------------------------------------


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="models, as patterns with commas")
    parser.add_argument("--systems", default="*", help="systems, as patterns with commas")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no system is begun that may not end by then")
    parser.add_argument("--jobs", type=int, default=0, help="compile so many systems at a time, before they are timed")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how a system's process begins")
    parser.add_argument("--json", type=Path, help="a file to which this run is added")
    parser.add_argument("--picture", type=Path, help="a folder for one SVG a model")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU: that it runs, no times")
    return parser


def main(benchmark: Benchmark, description: str | None, arguments: Sequence[str] | None) -> list[Row]:
    given = options(description).parse_args(arguments)
    rows = run(benchmark, given)
    if given.picture:
        draw(benchmark, rows, given.picture)
    return rows


def draw(benchmark: Benchmark, rows: Sequence[Row], folder: Path) -> None:
    """A picture for each model, `benchmark_model.svg`; a system's first word is its series."""
    (across, x_label), (up, y_label) = benchmark.axes
    for model in dict.fromkeys(row.model for row in rows):
        measured = [r for r in rows if r.model == model and r.get(up)]
        points = [Point(r.get(across), r.get(up), r.system, r.system.split()[0].strip(",")) for r in measured]
        if points:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{benchmark.name}_{re.sub('[^a-z0-9]+', '_', model.lower()).strip('_')}.svg"
            (folder / name).write_text(scatter(points, model, x_label, y_label))


def selected(names: Sequence[str], patterns: str) -> list[str]:
    """The names that match one of the patterns, whatever their case."""
    wanted = [p.strip().lower() for p in patterns.split(",")]
    return [n for n in names if any(fnmatch.fnmatchcase(n.lower(), p) for p in wanted)]


def run(benchmark: Benchmark, given: argparse.Namespace) -> list[Row]:
    """Measure what was asked for; prints a line for each, and returns the rows."""
    clock = Clock(given.seconds)
    models, systems = selected(benchmark.models, given.only), selected(benchmark.systems, given.systems)
    cases = [Case(model, system, given.tiny) for model in models for system in systems]
    if not cases:
        raise SystemExit(f"nothing to run; there are {list(benchmark.models)} and {list(benchmark.systems)}")
    for name in benchmark.imports:
        importlib.import_module(name)
    if given.tiny:
        log = Log(benchmark, given.json, machine(), {"tiny": True}, cases)
        return measure_all(cases, log, clock, lambda case: in_this_process(benchmark.measure, case))
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; --tiny runs anywhere")
    start, about = first_process(given.start)
    log = Log(benchmark, given.json, about, {"jobs": given.jobs, "start": start}, cases)
    with folder() as cache:
        if given.jobs:
            cases = [replace(case, cache=cache, warm=True) for case in cases]
            precompile(benchmark.measure, cases, start, given.jobs, clock)
        return measure_all(cases, log, clock, lambda case: isolated(benchmark.measure, case, start, clock.left))


def measure_all(cases: Sequence[Case], log: Log, clock: Clock, measure: Measure) -> list[Row]:
    for case in cases:
        if clock.left < clock.longest:
            why = f"left out: {clock.spent:.0f} of {clock.seconds:.0f} s were over"
            log.add(Row(case.model, case.system, why))
            continue
        with clock:
            log.add(measured(measure, case))
    return log.rows


def measured(measure: Measure, case: Case) -> Row:
    """The row of a case. What one system cannot do must not cost the others' figures."""
    try:
        figures = measure(case)
    except LeftOutError as why:
        return Row(case.model, case.system, str(why))
    except Exception as error:
        return Row(case.model, case.system, f"failed: {one_line(error)}")
    return Row(case.model, case.system, figures.pop("note", ""), figures)


def one_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


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


@dataclass
class Log:
    """Prints rows and adds them to the file, each as soon as it is there."""

    benchmark: Benchmark
    path: Path | None
    machine: dict[str, str]
    settings: dict[str, Any]
    cases: Sequence[Case]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.width = max(len(f"{c.model}: {c.system}") for c in self.cases) + 2
        self.before = json.loads(self.path.read_text())["runs"] if self.path and self.path.exists() else []
        print(f"{', '.join(self.machine.values())}\n{text_head(self.benchmark.columns, self.width)}", flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        baseline = baseline_of(self.rows, row.model, self.benchmark.baseline)
        print(text_line(self.benchmark.columns, self.width, row, baseline), flush=True)
        if self.path is None:
            return
        this = {"when": self.when, "machine": self.machine, "settings": self.settings}
        this["rows"] = [asdict(r) for r in self.rows]
        text = json.dumps({"benchmark": self.benchmark.name, "runs": [*self.before, this]}, indent=1)
        aside = self.path.with_suffix(".part")
        aside.write_text(text + "\n")
        aside.replace(self.path)


def load(path: Path) -> dict[str, Any]:
    """A file of runs: {benchmark, runs: [{when, machine, settings, rows}]}, the last run last."""
    found = json.loads(path.read_text())
    for each in found["runs"]:
        each["rows"] = [Row(**row) for row in each["rows"]]
    return found


# ---- processes ------------------------------------------------------------------------------------------------------


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
    fp8compile.plans.reset()
    gc.collect()


def isolated(measure: Measure, case: Case, start: str, seconds: float) -> dict[str, Any]:
    """What `measure` returns in a process of its own, which is stopped when it takes longer."""
    with folder() as cache:
        process, answer = begin(measure, case if case.cache else replace(case, cache=cache), start)
        try:
            if not answer.poll(max(seconds, 0.1)):
                process.kill()
                raise LeftOutError(f"stopped after {seconds:.0f} s")
            return outcome(answer)
        finally:
            end(process)


def precompile(measure: Measure, cases: Sequence[Case], start: str, jobs: int, clock: Clock) -> None:
    """Fill the cache that the cases share, several at a time; what fails will fail again, and be told then."""
    waiting = [replace(case, compile_only=True) for case in reversed(cases)]
    running: dict[Any, Any] = {}
    while (waiting or running) and clock.left > 0:
        while waiting and len(running) < jobs:
            process, answer = begin(measure, waiting.pop(), start)
            running[answer] = process
        for answer in wait(list(running), timeout=clock.left):
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
    except (RuntimeError, LeftOutError) as error:
        print(f"{start}: {error}; processes are spawned", flush=True)
        return "spawn", isolated(about_machine, case, "spawn", 60.0)


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
        raise RuntimeError("its process died") from None
    if isinstance(found, BaseException):
        raise found
    return found


def end(process: Any) -> None:
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join()


def work(measure: Measure, case: Case, answer: Connection) -> None:
    """What a system's process does."""
    os.environ.update({name: str(Path(case.cache, below)) for name, below in CACHES.items()})
    try:
        found: Any = measure(case)
    except LeftOutError as why:
        found = why
    except Exception as error:
        traceback.print_exc()
        found = RuntimeError(one_line(error))  # the error itself may not travel
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
