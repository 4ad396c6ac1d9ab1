"""The tables of README.md and docs/ that benchmarks have measured, and the README's picture, from benchmarks/results/.

    python -m benchmarks.tables             write them
    python -m benchmarks.tables --check     say which are not what the files give

A page has a place for each table:

    <!-- figures: train_step -->                every figure of every system, a table a model
    <!-- figures: train_step summary -->        a line a model: speed-up and peak memory beside the baseline
    <!-- figures: paired_steps models -->      a line a model: every figure of its one system
    <!-- figures: train_step front -->          a line a model, for the README; "headline": a sentence
    <!-- figures: compile_time passes -->       a line a pass: milliseconds
    <!-- figures: field rows -->                a line a row of the field suite
    <!-- figures: field short -->               which of them fall short of what, with the cause
    <!-- end of figures -->                     after each of them

A model's table is of the last run that measured the baseline on it; systems of other runs are never put beside it, and
what that run had no time for is not in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import front_page
from benchmarks.field import suite as field
from benchmarks.field import tables as field_tables
from benchmarks.harness import runs
from benchmarks.harness.columns import MISSING, Row, baseline_of, cells, markdown, ratio
from benchmarks.harness.runs import Benchmark
from benchmarks.micro import chunked_loss, matmul
from benchmarks.serving import inference
from benchmarks.training import block, compile_time, microbatches, paired_steps, short_steps, train_step

ROOT = Path(__file__).parents[1]
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        train_step.BENCHMARK,
        microbatches.BENCHMARK,
        short_steps.BENCHMARK,
        paired_steps.BENCHMARK,
        block.BENCHMARK,
        compile_time.BENCHMARK,
        matmul.BENCHMARK,
        chunked_loss.BENCHMARK,
        field.BENCHMARK,
        inference.BENCHMARK,
    )
}
PLACE = re.compile(r"(<!-- figures: (\w+) ?(\w*) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NO_TIME = ("left out: ", "stopped ")  # notes that say nothing of a system
PICTURES = {"docs/train_step.svg": (train_step.BENCHMARK, front_page.picture)}
Run = dict[str, Any]
Measured = dict[str, tuple[Run, list[Row]]]  # of each model the rows, and the run that they are of


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or say which differ; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md, docs/, benchmarks/results/")
    given = parser.parse_args(arguments)
    written = 0
    for name, old, made in (*pages(given.root), *pictures(given.root)):
        if made == old:
            continue
        written += 1
        if given.check:
            print(f"{name} is not what the files give; run: python -m benchmarks.tables")
        else:
            (given.root / name).write_text(made)
    return int(given.check and written > 0)


def pages(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each page's name, its text, and the text that the files give."""
    for page in [root / "README.md", *sorted(root.glob("docs/*.md"))]:
        text, name = page.read_text(), page.relative_to(root)
        try:
            yield name, text, filled(text, root / "benchmarks" / "results")
        except FileNotFoundError as missing:
            raise SystemExit(f"{name} shows {missing}") from None


def pictures(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the same of each picture that is there."""
    for name, (benchmark, draw) in PICTURES.items():
        if (root / name).exists():
            yield Path(name), (root / name).read_text(), draw(latest(benchmark, root / "benchmarks" / "results"))


def filled(text: str, results: Path) -> str:
    """Return a page with what the files give in all of its places."""

    def content(place: re.Match[str]) -> str:
        benchmark, form = BENCHMARKS[place[2]], FORMS[place[3]]
        return place[1] + form(benchmark, latest(benchmark, results)) + place[4]

    return PLACE.sub(content, text)


def latest(benchmark: Benchmark, results: Path) -> Measured:
    """For each model the last run that measured the baseline on it, and that run's rows of the model."""
    path = results / f"{benchmark.name}.json"
    found: Measured = {}
    if not path.exists():
        raise FileNotFoundError(f"{benchmark.name}, and benchmarks/results/{path.name} is not there")
    for run in runs.load(path)["runs"]:
        for model in benchmark.cases:
            rows = [row for row in run["rows"] if row.model == model and not row.note.startswith(NO_TIME)]
            shown = [row for row in rows if row.figures or benchmark.failures]
            if any(row.system == (benchmark.baseline or row.system) for row in shown):
                found[model] = run, rows
    return {model: found[model] for model in benchmark.cases if model in found}


def tables(benchmark: Benchmark, measured: Measured) -> str:
    """Return a table a model: a line a system."""
    head = ["system", *(c.head for c in benchmark.columns)]
    parts = []
    for model, (_, rows) in measured.items():
        baseline = baseline_of(rows, model, benchmark.baseline)
        lines = [[row.system, *line(benchmark, row, baseline)] for row in rows]
        parts.append(f"**{model}**\n\n{markdown(head, lines)}\n")
    return "\n" + "".join(parts) + origin(measured)


def models(benchmark: Benchmark, measured: Measured) -> str:
    """Return a line a model, of a benchmark with one system."""
    lines = [[row.model, *line(benchmark, row, None)] for _, (row,) in measured.values()]
    return "\n" + markdown(["", *(c.head for c in benchmark.columns)], lines) + "\n" + origin(measured)


def line(benchmark: Benchmark, row: Row, baseline: Row | None) -> list[str]:
    """Return the cells of a row; of one without figures the reason, and nothing."""
    if not row.figures:
        return [row.note, *[""] * (len(benchmark.columns) - 1)]
    return cells(benchmark.columns, row, baseline)


def summary(benchmark: Benchmark, measured: Measured) -> str:
    """Return a line a model: the baseline's figures; of others the speed-up, and the share of its peak or weights."""
    up = benchmark.axes[1][0]
    memory = "weights_gib" if benchmark.axes[0][0] == "weights_gib" else "peak_gib"
    faster, share = ratio("", up), ratio("", memory, inverse=True)
    systems = list(dict.fromkeys(row.system for _, rows in measured.values() for row in rows if row.figures))
    lines = []
    for model, (_, rows) in measured.items():
        baseline = baseline_of(rows, model, benchmark.baseline)
        by_system = {row.system: row for row in rows if row.figures}
        lines.append([model, *(short(by_system.get(s), baseline, memory, faster.cell, share.cell) for s in systems)])
    return "\n" + markdown(["", *systems], lines) + "\n" + origin(measured)


def short(row: Row | None, baseline: Row | None, memory: str, *parts: Callable[[Row, Row | None], str]) -> str:
    """Return a system in a few characters."""
    if row is None:
        return MISSING
    if row is baseline:
        return " · ".join(f"{row.get(key):.1f} {unit}" for key, unit in (("ms", "ms"), (memory, "GiB")) if row.get(key))
    return " · ".join(text for cell in parts if (text := cell(row, baseline)) != MISSING)


def passes(benchmark: Benchmark, measured: Measured) -> str:
    """Return a line a pass of ours: milliseconds, a column a model."""
    times = {model: row.get("by_pass") for model, (_, rows) in measured.items() for row in rows if row.get("by_pass")}
    names = dict.fromkeys(name for by_pass in times.values() for name in by_pass)
    lines = [[name, *(f"{1e3 * by_pass.get(name, 0.0):.0f}" for by_pass in times.values())] for name in names]
    return "\n" + markdown(["pass", *(f"{model}, ms" for model in times)], lines) + "\n" + origin(measured)


def rows(benchmark: Benchmark, measured: Measured) -> str:
    """Return a line a row of the field suite."""
    return "\n" + field_tables.lines(measured) + "\n" + origin(measured)


def short_rows(benchmark: Benchmark, measured: Measured) -> str:
    """Return those that fall short."""
    return "\n" + field_tables.short(measured) + "\n"


def front(benchmark: Benchmark, measured: Measured) -> str:
    """Return the README's table."""
    return (
        "\n" + front_page.table(measured) + "\n" + origin({m: measured[m] for m in front_page.MODELS if m in measured})
    )


def headline(benchmark: Benchmark, measured: Measured) -> str:
    """Return the README's first figure."""
    return front_page.headline(measured)


FORMS = {
    "": tables,
    "models": models,
    "summary": summary,
    "passes": passes,
    "rows": rows,
    "short": short_rows,
    "front": front,
    "headline": headline,
}


def origin(measured: Measured) -> str:
    """Return where and when: a line for each machine."""
    where: dict[str, list[str]] = {}
    for run, _ in measured.values():
        machine = ", ".join(f"{name} {value}" if name != "device" else value for name, value in run["machine"].items())
        where.setdefault(machine, []).append(run["when"][:10])
    return "".join(f"{machine}; {', '.join(dict.fromkeys(sorted(days)))}.\n" for machine, days in where.items())


if __name__ == "__main__":
    raise SystemExit(main())
