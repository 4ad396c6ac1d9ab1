"""What `convergence.py` makes of its runs: intervals, gaps, spikes, time to equal loss; as table, JSON and picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import curves

RECIPES = ("mixed", "tensorwise", "blockwise")
OURS = {f"{level} {recipe}": {"level": level, "recipe": recipe} for level in ("O2", "O3") for recipe in RECIPES}
STATES = "8-bit states"  # the model as BF16's, the optimizer's step compiled
CONFIGURATIONS = ("BF16", STATES, *OURS, "torchao tensorwise")
TAIL = 3  # evaluations that are averaged into a run's result
SPIKE = 0.2
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 % quantile, 1 … 10 degrees


@dataclass
class Run:
    """One configuration with one seed. evaluations: (finished steps, held-out loss); readings: mean training losses."""

    name: str
    seed: int
    steps: int
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    readings: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # a step's, one value for each timed stretch
    peak_bytes: int = 0
    fp8_matmuls: int = 0
    diverged: bool = False

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.diverged or (bool(self.evaluations) and self.evaluations[-1][0] >= self.steps)

    @property
    def loss(self) -> float:
        """The smoothed held-out loss at the end."""
        return math.inf if self.diverged else statistics.mean(loss for _, loss in self.evaluations[-TAIL:])

    @property
    def seconds_per_step(self) -> float:
        """NaN of a run that was not timed."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def spikes(self) -> int:
        return sum(x > min(self.readings[max(0, i - 5) : i], default=x) + SPIKE for i, x in enumerate(self.readings))


@dataclass(frozen=True)
class Interval:
    """A mean, and the half width of its 95 % interval (None of a single value)."""

    mean: float
    half: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        if len(values) < 2:
            return Interval(statistics.mean(values), None)
        quantile = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
        return Interval(statistics.mean(values), quantile * statistics.stdev(values) / len(values) ** 0.5)

    def text(self, form: str) -> str:
        return f"{self.mean:{form}} ± " + ("?" if self.half is None else f"{self.half:{form.replace('+', '')}}")


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each configuration with finished runs, in the order of `CONFIGURATIONS`."""
    done = {(r.name, r.seed): r for r in runs if r.finished}
    rows = []
    worst = max((r.loss for r in done.values() if not r.diverged), default=math.nan)
    for name in CONFIGURATIONS:
        mine = [r for (n, _), r in sorted(done.items()) if n == name]
        if not mine:
            continue
        pairs = [(r, done["BF16", r.seed]) for r in mine if ("BF16", r.seed) in done]
        gaps = [r.loss / b.loss - 1 for r, b in pairs if not r.diverged and not b.diverged]
        seconds = typical_seconds(mine)
        steps = [n for r in mine if (n := steps_to(r, worst)) is not None]
        rows.append({
            "name": name, "seeds": [r.seed for r in mine], "diverged": sum(r.diverged for r in mine),
            "loss": asdict(Interval.of([r.loss for r in mine])), "gap": asdict(Interval.of(gaps)) if gaps else None,
            "spikes": sum(r.spikes for r in mine),
            "seconds_per_step": seconds,
            "time_to_equal_loss": statistics.mean(steps) * seconds if len(steps) == len(mine) else None,
            "equal_loss": worst, "peak_bytes": max(r.peak_bytes for r in mine), "fp8_matmuls": mine[0].fp8_matmuls,
        })  # fmt: skip
    return rows


def typical_seconds(runs: Sequence[Run]) -> float:
    """Seconds of a step: the median of the runs that were timed, NaN where none was."""
    return statistics.median([r.seconds_per_step for r in runs if r.seconds] or [math.nan])


def steps_to(run: Run, loss: float) -> float | None:
    """Steps of training until the smoothed held-out loss is at most `loss`, interpolated; None if it never is."""
    smooth = smoothed(run)
    for (before, a), (after, b) in zip([(0, math.inf), *smooth[:-1]], smooth, strict=True):
        if b <= loss:
            share = 1.0 if not math.isfinite(a) else (a - loss) / (a - b)
            return before + share * (after - before)
    return None


def smoothed(run: Run) -> list[tuple[int, float]]:
    """Held-out losses, each the mean of the last `TAIL` up to it."""
    losses = [loss for _, loss in run.evaluations]
    return [
        (step, statistics.mean(losses[max(0, i + 1 - TAIL) : i + 1])) for i, (step, _) in enumerate(run.evaluations)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows for people."""
    lines = [
        f"{'configuration':<20}{'seeds':>5}  {'held-out loss':<17}{'gap to BF16':<19}{'spikes':>6}{'ms/step':>9}"
        f"{'matched':>9}{'peak GiB':>9}"
    ]
    base = next((r["time_to_equal_loss"] for r in rows if r["name"] == "BF16"), None)
    for r in rows:
        gap = Interval(**r["gap"]).text("+.2%") if r["gap"] and r["name"] != "BF16" else ""
        mine = r["time_to_equal_loss"]
        matched = f"{base / mine:.2f}×" if base and mine else "-"
        lines.append(
            f"{r['name']:<20}{len(r['seeds']):>5}  {Interval(**r['loss']).text('.4f'):<17}{gap:<19}{r['spikes']:>6}"
            f"{1000 * r['seconds_per_step']:>9.1f}{matched:>9}{r['peak_bytes'] / 2**30:>9.2f}"
            + (f"  {r['diverged']} diverged" if r["diverged"] else "")
        )
    return "\n".join(lines)


def picture(runs: Sequence[Run]) -> str:
    """Smoothed held-out losses over training time, as means over seeds with the range of the intervals as bands."""
    found = []
    for name in CONFIGURATIONS:
        mine = [r for r in runs if r.name == name and r.finished and not r.diverged]
        if not mine:
            continue
        smooth = [smoothed(r) for r in mine]
        at = [Interval.of([s[i][1] for s in smooth]) for i in range(min(map(len, smooth)))]
        seconds = typical_seconds(mine)
        x = [smooth[0][i][0] * seconds for i in range(len(at))]
        found.append(curves.Curve(name, x, [i.mean for i in at], [i.half or 0.0 for i in at]))
    return curves.draw(found, "Held-out loss (mean of seeds, 95 %)", "seconds of training", "nats per byte")


def report(folder: Path, settings: dict[str, Any]) -> str:
    """Write results.json and loss.svg from the runs in `folder`; returns the table."""
    runs = read_runs(folder)
    rows = summary(runs)
    (folder / "results.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    if any(r.finished and not r.diverged for r in runs):
        (folder / "loss.svg").write_text(picture(runs))
    return table(rows)


def read_runs(folder: Path) -> list[Run]:
    """Return the runs that `folder` knows."""
    return [Run(**json.loads(file.read_text())) for file in sorted(folder.glob("*-seed*.json"))]
