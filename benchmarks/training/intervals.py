"""Intervals of means and of gaps between runs, by Student's distribution."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLAIM = 0.001  # the half width of the interval that `pairs_for` counts pairs for
STUDENT = (  # 97.5 % quantile, 1 … 30 degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution with so many degrees of freedom, at least one."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]


@dataclass(frozen=True)
class Interval:
    """A mean, and the half width of its 95 % interval (None of a single value)."""

    mean: float
    half: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        if len(values) < 2:
            return Interval(statistics.mean(values), None)
        half = student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        return Interval(statistics.mean(values), half)

    def text(self, form: str) -> str:
        return f"{self.mean:{form}} ± " + ("?" if self.half is None else f"{self.half:{form.replace('+', '')}}")


@dataclass(frozen=True)
class Gap:
    """How far a configuration's runs are from BF16's of the same seeds, by one measure: loss / BF16's - 1.

    deviation: of one pair, None of a single one; pairs_needed: so many make an interval of ± `CLAIM`.
    """

    mean: float
    half: float | None
    deviation: float | None
    pairs: int
    pairs_needed: int | None

    @staticmethod
    def of(gaps: Sequence[float]) -> Gap:
        interval = Interval.of(gaps)
        deviation = statistics.stdev(gaps) if len(gaps) > 1 else None
        return Gap(
            interval.mean, interval.half, deviation, len(gaps), None if deviation is None else pairs_for(deviation)
        )


def pairs_for(deviation: float) -> int:
    """Return how many pairs of that deviation have an interval of at most ± `CLAIM`."""
    n = 2
    while student(n - 1) * deviation / n**0.5 > CLAIM:
        n += 1
    return n


def gaps_of_groups(losses: Mapping[tuple[str, int], Sequence[float]], base: str) -> tuple[float, dict[str, Interval]]:
    """Return the relative deviation of one run, and by how much groups of runs are from the base's of the same seeds.

    losses: by (group, seed), of runs that differ by chance alone, such as those from nudged weights. The deviation is
    pooled over all groups, so that one of two runs has as wide an interval as those beside it.
    """
    means = {cell: statistics.mean(values) for cell, values in losses.items()}
    freedom = sum(len(values) - 1 for values in losses.values())
    if not freedom:
        raise ValueError("no group has two runs of a seed: nothing says how far runs come apart by chance")
    squares = sum((x / means[cell] - 1) ** 2 for cell, values in losses.items() for x in values)
    deviation = (squares / freedom) ** 0.5
    gaps = {}
    for name in dict.fromkeys(name for name, _ in losses):
        seeds = [seed for other, seed in losses if other == name and (base, seed) in losses]
        if name != base and seeds:
            mean = statistics.mean(means[name, seed] / means[base, seed] - 1 for seed in seeds)
            variance = sum(1 / len(losses[x, seed]) for seed in seeds for x in (name, base)) / len(seeds) ** 2
            gaps[name] = Interval(mean, student(freedom) * deviation * variance**0.5)
    return deviation, gaps
