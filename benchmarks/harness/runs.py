"""Runs a benchmark: each system on each model in a process of its own, within a time, and nothing measured is lost.

    --only *8B*,*gpt*     models, as patterns with commas            --systems fp8*,"BF16 compile"     likewise
    --seconds 250         no system is begun that may not end by then, and what runs on is stopped
    --jobs 4 [--gpus 2]   four systems at a time, on all GPUs together; each has its GPU alone while it is timed
    --gib 70              GiB of a GPU that systems side by side may need together, by what earlier runs measured
    --json FILE           adds this run to FILE after every system       --picture FOLDER    time against peak memory

A system's process has an empty compile cache, so that its first step is a cold compile; with `--jobs` others compile
beside it, and compile times are not reported. One that runs out of memory beside others runs once more, with fewer.
Processes are forked from one that has imported everything and has not touched the GPU (`--start spawn` begins each from
nothing). `--tiny` runs everything in this process, on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.columns import Column, Row, baseline_of, text_head, text_line
from benchmarks.harness.jobs import Jobs
from benchmarks.harness.picture import Point, scatter
from benchmarks.harness.processes import (
    Case,
    Clock,
    Measure,
    about_machine,
    first_process,
    folder,
    in_this_process,
    isolated,
    measured,
    prepare_process,
    share_cores,
)
from benchmarks.harness.turns import Turns

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Benchmark:
    """What is run, and how its figures are shown.

    cases: the systems of each model; baseline: the one with which others are compared, if any is; axes: figures of the
    picture, across and up, with their labels; imports: modules that models need, imported once for all; again: measures
    in another process, with warm caches; alone: each system has a process of its own; failures: tables show models of
    which the baseline has no figures.
    """

    name: str
    cases: Mapping[str, Sequence[str]]
    measure: Measure
    columns: Sequence[Column]
    baseline: str
    axes: tuple[tuple[str, str], tuple[str, str]]
    imports: Sequence[str] = ()
    again: Measure | None = None
    alone: bool = True
    failures: bool = False


# ---- the command line -----------------------------------------------------------------------------------------------


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="models, as patterns with commas")
    parser.add_argument("--systems", default="*", help="systems, as patterns with commas")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no system is begun that may not end by then")
    parser.add_argument("--jobs", type=int, default=0, help="so many systems at a time, each timed alone")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs over which jobs are spread")
    parser.add_argument("--gib", type=float, default=0.0, help="GiB of a GPU that jobs may need together")
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
    """Draw a picture for each model, `benchmark_model.svg`; a system's first word is its series."""
    (across, x_label), (up, y_label) = benchmark.axes
    for model in dict.fromkeys(row.model for row in rows):
        measured = [r for r in rows if r.model == model and r.get(up)]
        points = [Point(r.get(across), r.get(up), r.system, r.system.split()[0]) for r in measured]
        if points:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{benchmark.name}_{re.sub('[^a-z0-9]+', '_', model.lower()).strip('_')}.svg"
            (folder / name).write_text(scatter(points, model, x_label, y_label))


def selected(names: Sequence[str], patterns: str) -> list[str]:
    """Return the names that match one of the patterns, whatever their case."""
    wanted = [p.strip().lower() for p in patterns.split(",")]
    return [n for n in names if any(fnmatch.fnmatchcase(n.lower(), p) for p in wanted)]


def run(benchmark: Benchmark, given: argparse.Namespace) -> list[Row]:
    """Measure what was asked for; prints a line for each, and returns the rows."""
    clock = Clock(given.seconds)
    cases = [
        Case(model, system, given.tiny)
        for model in selected(list(benchmark.cases), given.only)
        for system in selected(benchmark.cases[model], given.systems)
    ]
    if not cases:
        there = "; ".join(f"{model}: {', '.join(systems)}" for model, systems in benchmark.cases.items())
        raise SystemExit(f"nothing to run; there are {there}")
    if given.jobs and benchmark.again:
        raise SystemExit(f"{benchmark.name} measures compiling; --jobs would have it done before")
    if given.tiny or not benchmark.alone:
        log = Log(benchmark, given.json, about_machine(cases[0]), {"tiny": given.tiny}, cases)
        return measure_all(cases, log, clock, lambda case: both(benchmark, case, in_this_process))
    for name in benchmark.imports:
        with contextlib.suppress(ImportError):  # a model that needs it will say so
            importlib.import_module(name)
    if torch.cuda.is_initialized():  # by an import: a fork could not use the GPU
        given.start = "spawn"
    start, about = first_process(given.start)
    log = Log(benchmark, given.json, about, {"jobs": given.jobs, "start": start}, cases, sorts=True)

    def in_processes(case: Case) -> dict[str, Any]:
        with folder() as cache:
            case = case if case.cache else replace(case, cache=cache)
            return both(benchmark, case, lambda measure, case: isolated(measure, case, start, clock.left))

    return (
        side_by_side(benchmark, cases, log, given, start, clock)
        if given.jobs
        else measure_all(cases, log, clock, in_processes)
    )


@dataclass(frozen=True)
class Need:
    """A model and the GiB of a GPU that a system is reckoned to need for it."""

    name: str
    gib: float


def needs(cases: Sequence[Case], known: Path, limit: float) -> list[tuple[Need, str]]:
    """Return what each case is reckoned to need: the most that its model has needed in any run of the file `known`.

    What has never been measured may need all of `limit`: it has a GPU to itself.
    """
    peaks: dict[str, float] = {}
    for run in json.loads(known.read_text())["runs"] if known.exists() else ():
        for row in run["rows"]:
            peaks[row["model"]] = max(peaks.get(row["model"], 0.0), row["figures"].get("peak_gib") or 0.0)
    return [(Need(case.model, min(peaks.get(case.model) or limit, limit)), case.system) for case in cases]


def side_by_side(
    benchmark: Benchmark, cases: Sequence[Case], log: Log, given: argparse.Namespace, start: str, clock: Clock
) -> list[Row]:
    """Measure `given.jobs` cases at a time, each with its GPU alone while it is timed."""
    known = RESULTS / f"{benchmark.name}.json"
    wanted = needs(cases, known, given.gib) if given.gib else [(Need(case.model, 1.0), case.system) for case in cases]
    given.gib, given.limit = given.gib or math.ceil(given.jobs / given.gpus), given.seconds
    share_cores(given.jobs)
    with folder() as shared:
        jobs = Jobs(partial(on_gpu, benchmark.measure), given, start, Path(shared), clock, log.add)
        jobs.run(wanted)
    done = {(row.model, row.system) for row in log.rows}
    for case in cases:
        if (case.model, case.system) not in done:
            log.add(Row(case.model, case.system, f"left out: {clock.spent:.0f} of {clock.seconds:.0f} s were over"))
    return log.rows


def on_gpu(measure: Measure, case: Case, turns: Turns, gpu: str) -> dict[str, Any]:
    """Return a case's figures, measured by this process on one GPU that others use as well."""
    prepare_process(case, gpu)
    turns.join()
    return measure(replace(case, turns=str(turns.folder)))


def both(benchmark: Benchmark, case: Case, run: Callable[[Measure, Case], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a case; where a benchmark measures twice, those of both times."""
    figures = run(benchmark.measure, case)
    return figures | run(benchmark.again, replace(case, warm=True)) if benchmark.again else figures


def measure_all(cases: Sequence[Case], log: Log, clock: Clock, measure: Measure) -> list[Row]:
    for case in cases:
        if clock.left < clock.longest:
            why = f"left out: {clock.spent:.0f} of {clock.seconds:.0f} s were over"
            log.add(Row(case.model, case.system, why))
            continue
        with clock:
            log.add(measured(measure, case))
    return log.rows


@dataclass
class Log:
    """Prints rows and adds them to the file, each as soon as it is there; `sorts`: there in the order of the cases."""

    benchmark: Benchmark
    path: Path | None
    machine: dict[str, str]
    settings: dict[str, Any]
    cases: Sequence[Case]
    sorts: bool = False
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.width = max(len(f"{c.model}: {c.system}") for c in self.cases) + 2
        self.before = json.loads(self.path.read_text())["runs"] if self.path and self.path.exists() else []
        print(f"{', '.join(self.machine.values())}\n{text_head(self.benchmark.columns, self.width)}", flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.sorts:
            order = [(case.model, case.system) for case in self.cases]
            self.rows.sort(key=lambda row: order.index((row.model, row.system)))
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
    """Return a file of runs: {benchmark, runs: [{when, machine, settings, rows}]}, the last run last."""
    found = json.loads(path.read_text())
    for each in found["runs"]:
        each["rows"] = [Row(**row) for row in each["rows"]]
    return found
