"""Best casts: of each matmul the choice that adds least noise, as far as a budget of time reaches (recipe "auto").

    noise           measured at a look: of both operands, relative to the signal (`choices.noise`)
    milliseconds    estimated by the cost model when the graph was compiled (`Matmul.milliseconds_by_casts`)

Less noise is the only reason for other casts: times are estimates, and the recipe's own casts are those of which whole
steps have been measured. All matmuls begin with the fastest of their choices; choices are exchanged in the order of the
noise that they spare for a millisecond, until `allowed` milliseconds are spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fp8compile.adaptive.choices import COARSE, GROUPS, Choice, Sides, noise
from fp8compile.plan.rows import Matmul, Operand

WORTH = 0.8  # of the noise: what spares a matmul less than 1 dB is not worth other casts
WORTH_COMPILING = 0.95  # of the noise of all matmuls: what spares less is not worth a compilation
SPACING = 16  # less noise is a reason to compile after so many steps, and then after so many times as many as before
GRADIENTS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))  # formats, where an operand is a gradient


@dataclass(frozen=True)
class Way:
    """A choice of a matmul, with the noise that it adds and the milliseconds that it takes."""

    choice: Choice
    noise: float
    milliseconds: float

    @property
    def decibels(self) -> float:
        """Return what both operands together keep, in dB."""
        return 200.0 if self.noise == 0 else -10 * math.log10(self.noise)


def way(row: Matmul, choice: Choice, sides: Sides) -> Way | None:
    """Return a choice with its noise and its time; None where no time is known."""
    assert choice.left is not None, "a choice in BF16 has no casts"
    assert choice.right is not None, "a choice in BF16 has no casts"
    time = row.milliseconds_by_casts.get(f"{choice.left.granularity} × {choice.right.granularity}")
    return None if time is None else Way(choice, noise(choice, sides), time)


def all_choices(row: Matmul, baseline: Choice, grouped: bool) -> Iterator[Choice]:
    """Yield the baseline, then what else a matmul may be; grouped: the device has matmuls with groups.

    An operand that arrived in FP8 keeps its cast.
    """
    yield baseline
    formats = GRADIENTS if row.role in ("grad_input", "grad_weight") else GRADIENTS[:1]
    casts = [(f, g) for f in formats for g in COARSE] + [(formats[0], GROUPS)] * grouped
    for (left, right), (of_left, of_right) in casts:
        choice = Choice(Operand(left, of_left), Operand(right, of_right), baseline.fast_accumulation)
        pairs = ((choice.left, baseline.left), (choice.right, baseline.right))
        if choice != baseline and all(old is None or not old.gathered or new == old for new, old in pairs):
            yield choice


def worthwhile(ways: Sequence[Way], baseline: Way | None, now: Way) -> list[Way]:
    """Return the baseline, `now`, and the ways that add clearly less noise than the baseline.

    baseline: as the recipe has it; None where that does not keep what is demanded, so that `now` is compared with.
    """
    most = WORTH * (baseline or now).noise
    return [x for x in ways if x in (baseline, now) or x.noise <= most]


def select(ways: Sequence[Sequence[Way]], allowed: float) -> list[Way]:
    """Return one of the ways of each matmul: together at most `allowed` milliseconds longer than the fastest ones."""
    frontiers = [_frontier(each) for each in ways]
    chosen = [0] * len(ways)
    exchanges = [
        ((a.noise - b.noise) / (b.milliseconds - a.milliseconds), -place, i, place + 1, b.milliseconds - a.milliseconds)
        for i, frontier in enumerate(frontiers)
        for place, (a, b) in enumerate(pairwise(frontier))
    ]
    for _, _, i, place, time in sorted(exchanges, reverse=True):
        if place == chosen[i] + 1 and time <= allowed:
            chosen[i], allowed = place, allowed - time
    return [frontier[place] for frontier, place in zip(frontiers, chosen, strict=True)]


def is_better(now: Sequence[Way], wanted: Sequence[Way]) -> bool:
    """Return True if the matmuls of a graph add so much less noise as `wanted` that it is worth a compilation."""
    return sum(x.noise for x in wanted) <= WORTH_COMPILING * sum(x.noise for x in now)


def _frontier(ways: Sequence[Way]) -> list[Way]:
    """Return the ways from the fastest on, each sparing less noise for a millisecond than the one before."""
    found: list[Way] = []
    for x in sorted(ways, key=lambda x: (x.milliseconds, x.noise)):
        if found and x.noise >= found[-1].noise:
            continue
        while len(found) > 1 and _spared(found[-2], found[-1]) <= _spared(found[-1], x):
            found.pop()
        found.append(x)
    return found


def _spared(a: Way, b: Way) -> float:
    return (a.noise - b.noise) / (b.milliseconds - a.milliseconds)
