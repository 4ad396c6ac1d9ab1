"""What `convergence.py` makes of its runs: intervals, gaps, spikes, time to equal loss; as table, JSON and picture."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import curves
from benchmarks.harness.peers import FAST_GRAD_INPUT, FAST_GRADIENTS
from benchmarks.training import routing
from benchmarks.training.intervals import CLAIM, Gap, Interval, gaps_of_groups

RECIPES = ("mixed", "tensorwise", "blockwise")
ROLES = ("output", "grad_input", "grad_weight")
IN_FP8_ALONE: dict[str, dict[str, Any]] = {
    role: {"base": "mixed", **dict.fromkeys(other for other in ROLES if other != role)} for role in ROLES
}
E5M2_GRADIENT = {"left": {"format": "e5m2"}}  # of a gradient in E4M3 small elements become zero
PARTS: dict[str, dict[str, Any]] = {  # one part of FP8 each, for `branches.py`
    **{f"{role} alone": {"level": "O2", "recipe": recipe} for role, recipe in IN_FP8_ALONE.items()},
    "saved alone": {"level": "O2", "save": "fp8", "recipe": {"base": "mixed", **dict.fromkeys(ROLES)}},
}
PARTS_OF_O3 = (*ROLES, "saved", "states")
THREE_PARTS: dict[str, dict[str, Any]] = {  # with each part alone and with O3: half of all combinations
    " + ".join(parts): {
        "level": "O3" if "states" in parts else "O2",
        "save": "fp8" if "saved" in parts else "bf16",
        "recipe": {"base": "mixed", **{role: None for role in ROLES if role not in parts}},
    }
    for parts in itertools.combinations(PARTS_OF_O3, 3)
}
OURS: dict[str, dict[str, Any]] = {
    **{f"{level} {recipe}": {"level": level, "recipe": recipe} for level in ("O2", "O3") for recipe in RECIPES},
    "O3 FP32 states": {"level": "O2", "recipe": "mixed", "save": "auto"},
    "O3 rowwise": {"level": "O3", "recipe": "rowwise"},
    "O3 E5M2 gradients": {"level": "O3", "recipe": {"base": "mixed", **dict.fromkeys(ROLES[1:], E5M2_GRADIENT)}},
    "O3 fast grad_input": {"level": "O3", "recipe": FAST_GRAD_INPUT},
    "O3 fast gradients": {"level": "O3", "recipe": FAST_GRADIENTS},
    "O3 two passes": {"level": "O3", "one_pass_casts": False},
    "O3 first in BF16": {"level": "O3", "skip": ["*blocks.{first}.*"]},
    "O3 ends in BF16": {"level": "O3", "skip": ["*blocks.{first}.*", "*blocks.{last}.*"]},
    "O3 FP8 head": {"level": "O3", "lm_head": True},
    "FP8 head alone": {"level": "O2", "lm_head": True, "skip": ["*blocks.*"], "save": "bf16"},
    "O3 auto": {"level": "O3", "adaptive": "auto"},
    "O3 recipe auto": {"level": "O3", "recipe": "auto"},
    **PARTS,
    **THREE_PARTS,
}
ALL_IN_FP8, NONE_IN_FP8 = "all with matmuls in FP8", "all without"
STATES = "8-bit states"  # the model as BF16's, the optimizer's step compiled
NUDGED = "BF16 nudged"
NUDGES = re.compile(r" nudged( [0-9]+)?$")  # how the name of a run from nudged weights ends; the number is of the nudge
CONFIGURATIONS = ("BF16", NUDGED, STATES, *(x for x in OURS if x not in PARTS | THREE_PARTS), "torchao tensorwise")
KNOWN = tuple(dict.fromkeys((*CONFIGURATIONS, *OURS)))  # in the order of tables
SMOOTHED, LAST, AVERAGED, IN_BF16 = "smoothed", "last", "averaged", ", in BF16"  # measures of a run; the last a suffix
MEASURES = (SMOOTHED, LAST, LAST + IN_BF16, AVERAGED, AVERAGED + IN_BF16)
TAIL = 3  # evaluations that are averaged into a smoothed loss
SPIKE = 0.2
READING = 10  # steps in a reading of the training loss


def without_nudge(name: str) -> str:
    """Return the configuration of which `name` is a run from nudged weights, or `name`."""
    return NUDGES.sub("", name)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of configurations in the order of tables, each before its runs from nudged weights."""
    return sorted(set(names), key=lambda name: (KNOWN.index(without_nudge(name)), name))


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
    norms: list[float] = field(default_factory=list)  # of gradients, as readings
    final: dict[str, float] = field(default_factory=dict)  # measure → held-out loss; older runs have none
    routing: list[list[float]] = field(default_factory=list)  # of a mixture: shares of tokens, by layer and expert

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.diverged or (bool(self.evaluations) and self.evaluations[-1][0] >= self.steps)

    @property
    def loss(self) -> float:
        """Return the held-out loss of the averaged weights; of a run that has none, the smoothed one at the end."""
        found = self.measured(AVERAGED)
        return self.smoothed_loss if found is None else found

    @property
    def smoothed_loss(self) -> float:
        """Return the mean of the last evaluations."""
        return math.inf if self.diverged else statistics.mean(loss for _, loss in self.evaluations[-TAIL:])

    def measured(self, measure: str) -> float | None:
        """Return one of the `MEASURES` of the run, None where it was not taken."""
        return self.smoothed_loss if measure == SMOOTHED else math.inf if self.diverged else self.final.get(measure)

    @property
    def seconds_per_step(self) -> float | None:
        """Return the median; None for a run that was not timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spikes(self) -> int:
        return sum(x > min(self.readings[max(0, i - 5) : i], default=x) + SPIKE for i, x in enumerate(self.readings))


def gaps_by_measure(pairs: Sequence[tuple[Run, Run]]) -> dict[str, dict[str, Any]]:
    """Return of (run, BF16's run of the same seed) the gap by each measure that all pairs have."""
    found = {}
    for measure in MEASURES:
        both = [(run.measured(measure), base.measured(measure)) for run, base in pairs]
        gaps = [mine / base - 1 for mine, base in both if mine is not None and base is not None]
        if gaps and len(gaps) == len(both):
            found[measure] = asdict(Gap.of(gaps))
    return found


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each configuration with finished runs, in the order of `KNOWN`."""
    done = {(r.name, r.seed): r for r in runs if r.finished}
    rows = []
    worst = max((r.smoothed_loss for r in done.values() if not r.diverged), default=math.nan)
    for name in in_order(name for name, _ in done):
        mine = [r for (n, _), r in sorted(done.items()) if n == name]
        if not mine:
            continue
        pairs = [(r, done["BF16", r.seed]) for r in mine if ("BF16", r.seed) in done]
        pairs = [(r, b) for r, b in pairs if not r.diverged and not b.diverged]
        gaps = [r.loss / b.loss - 1 for r, b in pairs]
        seconds = typical_seconds(mine)
        steps = [n for r in mine if (n := steps_to(r, worst)) is not None]
        rows.append({
            "name": name, "seeds": [r.seed for r in mine], "diverged": sum(r.diverged for r in mine),
            "loss": asdict(Interval.of([r.loss for r in mine])), "gap": asdict(Interval.of(gaps)) if gaps else None,
            "gaps": {} if name == "BF16" else gaps_by_measure(pairs),
            "spikes": sum(r.spikes for r in mine),
            "seconds_per_step": seconds,
            "time_to_equal_loss": statistics.mean(steps) * seconds if len(steps) == len(mine) and seconds else None,
            "equal_loss": worst, "peak_bytes": max(r.peak_bytes for r in mine), "fp8_matmuls": mine[0].fp8_matmuls,
        })  # fmt: skip
    return rows


def typical_seconds(runs: Sequence[Run]) -> float | None:
    """Return the seconds of a step: the median of the runs that were timed, None where none was."""
    timed = [seconds for r in runs if (seconds := r.seconds_per_step) is not None]
    return statistics.median(timed) if timed else None


def milliseconds(seconds: float | None) -> str:
    """Return a time for people, "-" where it was not measured."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


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
        f"{'configuration':<25}{'seeds':>5}  {'held-out loss':<17}{'gap to BF16':<19}{'spikes':>6}{'ms/step':>9}"
        f"{'matched':>9}{'peak GiB':>9}"
    ]
    base = next((r["time_to_equal_loss"] for r in rows if r["name"] == "BF16"), None)
    for r in rows:
        gap = Interval(**r["gap"]).text("+.2%") if r["gap"] and r["name"] != "BF16" else ""
        mine = r["time_to_equal_loss"]
        matched = f"{base / mine:.2f}×" if base and mine else "-"
        lines.append(
            f"{r['name']:<25}{len(r['seeds']):>5}  {Interval(**r['loss']).text('.4f'):<17}{gap:<19}{r['spikes']:>6}"
            f"{milliseconds(r['seconds_per_step']):>9}{matched:>9}{r['peak_bytes'] / 2**30:>9.2f}"
            + (f"  {r['diverged']} diverged" if r["diverged"] else "")
        )
    return "\n".join(lines)


def noise_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return, for people, the gap by each measure, how much one pair scatters, and the pairs that a claim takes."""
    lines = [f"{'gap to BF16 by measure':<40}{'pairs':>5}  {'gap':<18}{'of a pair':>9}{f'pairs for ±{CLAIM:.1%}':>18}"]
    for row in rows:
        for measure, gap in row["gaps"].items():
            if gap["deviation"] is not None:
                interval = Interval(gap["mean"], gap["half"]).text("+.2%")
                lines.append(
                    f"{row['name'] + ', ' + measure:<40}{gap['pairs']:>5}  {interval:<18}{gap['deviation']:>9.2%}"
                    f"{gap['pairs_needed']:>18}"
                )
    return "\n".join(lines) if len(lines) > 1 else ""


def table_of_nudged_runs(runs: Sequence[Run]) -> str:
    """Return, for people, the gaps of configurations that have runs from nudged weights; "" where none has.

    Runs from nudged weights count as further runs of their configuration and seed. The last row takes all runs with
    matmuls in FP8 together, and all without.
    """
    done = [r for r in runs if r.finished and not r.diverged]
    nudged = {without_nudge(r.name) for r in done if r.name != without_nudge(r.name)}
    if not nudged:
        return ""
    by_name, by_matmuls = (
        defaultdict[tuple[str, int], list[float]](list),
        defaultdict[tuple[str, int], list[float]](list),
    )
    for run in done:
        by_name[without_nudge(run.name), run.seed].append(run.loss)
        by_matmuls[ALL_IN_FP8 if run.fp8_matmuls else NONE_IN_FP8, run.seed].append(run.loss)
    lines = [f"{'gap to BF16, with nudged runs':<30}{'runs':>5}  {'gap':<18}{'of a run':>9}"]
    for losses, base in ((by_name, "BF16"), (by_matmuls, NONE_IN_FP8)):
        if max(len(values) for values in losses.values()) < 2:
            continue
        deviation, gaps = gaps_of_groups(losses, base)
        for name, gap in gaps.items():
            count = sum(len(values) for (other, _), values in losses.items() if other == name)
            lines.append(f"{name:<30}{count:>5}  {gap.text('+.2%'):<18}{deviation:>9.2%}")
    return "\n".join(lines) if len(lines) > 1 else ""


def running_table(runs: Sequence[Run]) -> str:
    """Return, for people, how runs that are not finished stand beside BF16's of the same seed, at a step of both."""
    lines = [
        f"{'not finished':<20}{'seed':>5}{'at step':>13}{'loss':>9}{'BF16':>9}{'gap':>8}{'ms/step':>9}{'spikes':>8}"
    ]
    bf16 = {r.seed: r for r in runs if r.name == "BF16" and r.evaluations}
    for r in runs:
        base = bf16.get(r.seed)
        if base is None or base is r or not r.evaluations or (r.finished and base.finished):
            continue
        mine, others = (dict(smoothed(x)) for x in (r, base))
        step = max(mine.keys() & others.keys(), default=None)
        if step is not None:
            gap = mine[step] / others[step] - 1
            lines.append(
                f"{r.name:<20}{r.seed:>5}{f'{step} of {r.steps}':>13}{mine[step]:>9.4f}{others[step]:>9.4f}{gap:>+8.2%}"
                f"{milliseconds(r.seconds_per_step):>9}{f'{base.spikes} → {r.spikes}':>8}"
            )
    return "\n".join(lines) if len(lines) > 1 else ""


def picture(runs: Sequence[Run]) -> str:
    """Draw smoothed held-out losses over training time, means over seeds, with the range of the intervals as bands.

    Where a configuration has no run that was timed, all are drawn over steps.
    """
    by_name = _by_name(runs)
    seconds = {name: s for name, mine in by_name if (s := typical_seconds(mine)) is not None}
    timed = len(seconds) == len(by_name)
    found = []
    for name, mine in by_name:
        smooth = [smoothed(r) for r in mine]
        places = [step * (seconds[name] if timed else 1.0) for step, _ in min(smooth, key=len)]
        found.append(_curve(name, places, [[loss for _, loss in s] for s in smooth]))
    along = "seconds of training" if timed else "steps of training"
    return curves.draw(found, "Held-out loss (mean of seeds, 95 %)", along, "nats per byte")


def picture_of_norms(runs: Sequence[Run]) -> str:
    """Return norms of gradients over steps, drawn as `picture` draws losses; "" where no run has them."""
    found = [
        _curve(name, [READING * (i + 0.5) for i in range(min(len(r.norms) for r in mine))], [r.norms for r in mine])
        for name, mine in _by_name([r for r in runs if r.norms])
    ]
    return curves.draw(found, "Norm of the gradients (mean of seeds, 95 %)", "steps", "norm") if found else ""


def _by_name(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Return the finished runs of each configuration that has some and did not diverge."""
    good = [r for r in runs if r.finished and not r.diverged]
    return [(name, [r for r in good if r.name == name]) for name in in_order(r.name for r in good)]


def _curve(name: str, x: list[float], values: Sequence[Sequence[float]]) -> curves.Curve:
    at = [Interval.of([v[i] for v in values]) for i in range(len(x))]
    return curves.Curve(name, x, [i.mean for i in at], [i.half or 0.0 for i in at])


def report(folder: Path, settings: dict[str, Any]) -> str:
    """Write results.json and loss.svg from the runs in `folder`; returns the table."""
    runs = read_runs(folder)
    rows = summary(runs)
    (folder / "results.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    if any(r.finished and not r.diverged for r in runs):
        (folder / "loss.svg").write_text(picture(runs))
    if norms := picture_of_norms(runs):
        (folder / "norms.svg").write_text(norms)
    tables = (
        table(rows), noise_table(rows), table_of_nudged_runs(runs), routing.table(_routing(runs)), running_table(runs),
    )  # fmt: skip
    return "\n\n".join(filter(None, tables))


def _routing(runs: Sequence[Run]) -> dict[tuple[str, int], list[list[float]]]:
    return {(r.name, r.seed): r.routing for name, mine in _by_name(runs) for r in mine if r.routing}


def read_runs(folder: Path) -> list[Run]:
    """Return the runs that `folder` knows."""
    return [Run(**json.loads(file.read_text())) for file in sorted(folder.glob("*-seed*.json"))]
