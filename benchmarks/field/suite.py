"""A field suite: models as their libraries ship them, trained by BF16 `torch.compile` and by `backend="fp8"`.

    python -m benchmarks.field.suite --gpus 2 --jobs 24 --seconds 540        again, until no row is left
    python -m benchmarks.field.suite --only "T5*,Swin*" --again              rows that have been measured, once more
    python -m benchmarks.field.suite --tiny --json FILE                      small rows on a CPU: that it runs, no times

A row is a model (benchmarks/field/models/) and is trained twice, each time in a process of its own with an empty
compile cache: by `torch.compile(model)` with torch's fused AdamW, and by `torch.compile(model, backend="fp8")` with
`torch.compile(opt.step, backend="fp8")`. Default options, no skips, nothing chosen for a model.

ms          median time of a step; for that the process has its GPU alone (turns.py), whatever compiles beside it
first, peak GiB allocated at most during the first steps, optimizer included, and during later ones
cold        seconds of compiling and running the first step, optimizer included
in FP8      share of the FLOPs of matmuls that the plan has in FP8
worst       dB of the gradient furthest from BF16 eager of the same weights and batch; median: of all, both without
            those that BF16 itself gets wrong (field_bounds.py says which are right, and why). BF16's row has those of
            BF16 `torch.compile`.

Rows that --json has are skipped, and every row is added as soon as it is there: a run that is over goes on in the next.
So is what one system has measured while the other has not: it waits in a file beside (FILE.halves). A row that crashes
or takes longer than --limit is a row that says so. --gib reckons with all systems at their peaks at once, which they
seldom are: up to three times what a GPU has keeps its cores busy, and what runs out of memory beside others runs again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# Libraries look for a GPU when they are imported: asked of its driver, no fork of this process has to do without.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

from benchmarks.field import bounds as field_bounds
from benchmarks.field.halves import Halves
from benchmarks.field.models import BY_NAME, MODELS
from benchmarks.field.models.task import FieldModel
from benchmarks.field.steps import OURS, SYSTEMS, comparison_of, measure
from benchmarks.field.tables import shortfalls
from benchmarks.harness import runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.jobs import Jobs, interleaved
from benchmarks.harness.peers import BASELINE
from benchmarks.harness.processes import Case, Clock, about_machine, first_process, folder, share_cores
from benchmarks.harness.runs import Benchmark, Log, selected

FILE = Path(__file__).parents[1] / "results" / "field.json"
COMPILERS = ("torch._inductor.compile_fx", "torch._inductor.codegen.triton", "fp8compile.backend")
LIBRARIES = ("transformers", "timm", "torchvision")  # others start CUDA when they are imported, so rows import them
OF_EACH = ("decibels", "elements", "bf16_decibels", "rounded_decibels")  # gradient
COLUMNS = (
    figure("ms", "ms"),
    ratio("speed-up", "ms"),
    figure("first", "first_peak_gib", ".2f"),
    figure("peak", "peak_gib", ".2f"),
    figure("cold", "cold_seconds"),
    ratio("of BF16's", "cold_seconds", inverse=True),
    figure("in FP8", "fp8_share", ".0%"),
    figure("worst", "worst"),
    figure("median", "median"),
)
BENCHMARK = Benchmark(
    "field",
    {row.name: [s.name for s in SYSTEMS] for row in MODELS},
    lambda case: {},  # measured by field_steps.measure, which has to know its GPU
    COLUMNS,
    BASELINE.name,
    axes=(("peak_gib", "peak, GiB"), ("ms", "step, ms")),
    failures=True,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure what is left to measure; see the top of this file."""
    given = options().parse_args(arguments)
    names = selected([row.name for row in MODELS], given.only)
    left = names if given.again else [name for name in names if name not in measured(given.json)]
    print(f"{len(left)} of {len(names)} rows are to be measured", flush=True)
    return run(left, given) if left else []


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="rows, as patterns with commas")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has as well")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the run is over by then")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one system on one row may take")
    parser.add_argument("--jobs", type=int, default=4, help="systems side by side, on all GPUs together")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs over which rows are spread")
    parser.add_argument("--gib", type=float, default=70.0, help="memory of a GPU, were all on it at their peak at once")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how a process begins")
    parser.add_argument("--json", type=Path, default=FILE, help="the file to which rows are added")
    parser.add_argument("--tiny", action="store_true", help="small rows on a CPU: that it runs, no times")
    return parser


def measured(path: Path) -> set[str]:
    """Rows that the file has; those of libraries that were not there may be there now."""
    found = runs.load(path)["runs"] if path.exists() else []
    return {r.model for each in found for r in each["rows"] if r.system == OURS.name and not r.get("left_out")}


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def run(names: Sequence[str], given: argparse.Namespace) -> list[Row]:
    clock = Clock(given.seconds)
    share_cores(given.jobs)
    start, about = _first(given)
    settings = {"jobs": given.jobs, "gpus": given.gpus, "start": start, "tiny": given.tiny}
    log = Log(BENCHMARK, given.json, about, settings, [Case(name, OURS.name) for name in names])
    halves = Halves(given.json.with_suffix(".halves.json"), [s.name for s in SYSTEMS])

    def done(row: Row) -> None:
        for each in settled(halves.add(row)):
            log.add(each)

    with folder() as shared:
        jobs = Jobs(measure, given, start, Path(shared), clock, done)
        jobs.run(_cases(names, halves))
    print(f"{clock.spent:.0f} s, {len(log.rows) // 2} rows", flush=True)
    for baseline, ours in zip(log.rows[::2], log.rows[1::2], strict=True):
        for what, cause in shortfalls(baseline, ours):
            print(f"{ours.model}: {what} ({cause})", flush=True)
    return log.rows


def _first(given: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return how processes begin, and the machine. What all need is imported first: forks have it."""
    for library in (*LIBRARIES, *COMPILERS):
        with contextlib.suppress(Exception):  # a row that needs it will say so
            importlib.import_module(library)
    if given.tiny:
        return given.start, about_machine(Case("", "", tiny=True))
    return first_process("spawn" if torch.cuda.is_initialized() else given.start)


def _cases(names: Sequence[str], halves: Halves) -> list[tuple[FieldModel, str]]:
    """Return what is to be measured: first what is missing beside a half, then rows of which nothing is there."""
    left = [(model, system.name) for model in interleaved([BY_NAME[name] for name in names]) for system in SYSTEMS]
    left = [(model, system) for model, system in left if not halves.has(model.name, system)]
    return sorted(left, key=lambda case: not any(halves.has(case[0].name, system.name) for system in SYSTEMS))


def settled(rows: list[Row]) -> list[Row]:
    """Return the rows of a model, with what their gradients come to in place of each gradient's dB; none of none."""
    if not rows:
        return []
    baseline, ours = rows
    bf16, got = comparison_of(baseline), comparison_of(ours)
    right = field_bounds.conditioning(baseline.get("bf16_decibels") or {}, bf16.decibels if bf16 else {})
    error = max(baseline.get("bf16_loss_error") or 0.0, bf16.loss_error if bf16 else 0.0)
    wrong = [] if got is None else field_bounds.wrongs(got, right, error, baseline.get("rounded_decibels"))
    ours = replace(ours, figures={**short(ours, right), "wrong": wrong})
    return [replace(baseline, figures=short(baseline, right)), ours]


def short(row: Row, right: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures without those of each gradient; `right`: what BF16 gets right of each.

    Of gradients that BF16 gets wrong itself, dB say nothing: they are judged (field_bounds.py), and left out here.
    """
    figures = {k: v for k, v in row.figures.items() if k not in OF_EACH}
    all_of_them = row.get("decibels") or {}
    telling = {name: db for name, db in all_of_them.items() if right.get(name, 0.0) >= field_bounds.TELLING}
    figures |= {"gradients": len(all_of_them), "telling": len(telling)} if all_of_them else {}
    decibels = {name: db for name, db in telling.items() if db < math.inf}
    if decibels:
        name = min(decibels, key=lambda name: decibels[name])
        worst, median = max(decibels[name], -200.0), field_bounds.median(decibels.values())
        figures |= {"worst": worst, "worst_name": name, "median": median}
    return figures


if __name__ == "__main__":
    main()
