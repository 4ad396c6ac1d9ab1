"""Choices: the ways in which a matmul may run, and what each keeps of its operands, as a look has measured it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fp8compile.adaptive.settings import Adaptive
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand

Key: TypeAlias = tuple[str, str, int]  # module path, role, occurrence
Sides: TypeAlias = Mapping[str, Row]  # what was measured of the left and the right operand
COARSE = (("tensor", "tensor"), ("row", "tensor"), ("tensor", "row"), ("row", "row"))
GROUPS = ("group(128)", "group(128)")


@dataclass(frozen=True)
class Choice:
    """A way in which a matmul may run; without casts: in BF16."""

    left: Operand | None = None
    right: Operand | None = None
    fast_accumulation: bool = False

    def __str__(self) -> str:
        return BF16 if self.left is None else f"{self.left} × {self.right}"


def keyed(rows: Iterable[Matmul]) -> Iterator[tuple[Matmul, Key, list[Key]]]:
    """Yield (row, its key, the keys of what it was merged of), as statistics and given plans count them."""
    own: Counter[tuple[str, str]] = Counter()
    members: Counter[tuple[str, str]] = Counter()
    for row in rows:
        paths = row.merged or (row.path,)
        yield row, (row.path, row.role, own[row.path, row.role]), [(p, row.role, members[p, row.role]) for p in paths]
        own[row.path, row.role] += 1
        members.update((p, row.role) for p in paths)


def choice_of(row: Matmul) -> Choice:
    """Return how a matmul runs."""
    return Choice(row.left, row.right, row.fast_accumulation) if row.decision == FP8 else Choice()


def rank(choice: Choice) -> int:
    """Return the rank of a choice by its cost: 0 to 2 by its scales of rows, 3 with groups, 4 for BF16."""
    if choice.left is None or choice.right is None:
        return 4
    kinds = [o.granularity for o in (choice.left, choice.right)]
    return 3 if any(k.startswith(("group", "block")) for k in kinds) else kinds.count("row")


# ---- evidence -------------------------------------------------------------------------------------------------------


def worst(choice: Choice, sides: Sides, settings: Adaptive, more: float) -> str | None:
    """Return what an operand does not keep with a choice; None if both keep all that is demanded."""
    for side, operand in (("left", choice.left), ("right", choice.right)):
        why = short(sides[side], _cast(operand), settings, more) if operand is not None else None
        if why is not None:
            return f"{side} operand: {why}"
    return None


def short(row: Row, cast: str, settings: Adaptive, more: float) -> str | None:
    """Return what a cast loses more of than it may; None if nothing."""
    sqnr, *even = measures(row, cast)
    rest = f"amax {row.amax:.3g}, {row.underflown:.1%} underflow"
    if sqnr is not None and sqnr < settings.minimum + more:
        return f"SQNR {sqnr:.1f} dB of {settings.minimum + more:g}, {rest}"
    for name, value in zip(("rows", "columns"), even, strict=True):
        if value is not None and value < settings.even + more:
            what = "a few rows hide the rest" if name == "rows" else "outlier channels"
            return f"{what}: by {name} {value:.1f} dB of {settings.even + more:g}, {rest}"
    return None


def measures(row: Row, cast: str) -> tuple[float | None, float | None, float | None]:
    """Return what an operand keeps under a cast, in dB: over all, by rows, by columns; None of what is silent.

    Of blocks of a weight, which lie between a tensor and groups, nothing is measured unless they are in use: those of a
    tensor are returned.
    """
    if cast == row.cast:
        return row.sqnr, row.by_rows, row.by_columns
    known = cast if cast in row.what_if else f"{cast.split(' ')[0]} tensor"
    return row.what_if[known], *row.evenly[known]


def kept(choice: Choice, sides: Sides) -> str:
    """Return the least that each operand keeps with a choice, by any of the three measures."""
    found = []
    for side, operand in (("left", choice.left), ("right", choice.right)):
        known = _cast(operand) if operand is not None else ""
        values = [v for v in (sides[side].what_if.get(known), *sides[side].evenly.get(known, ())) if v is not None]
        found.append(f"{min(values):.1f}" if values else "-")
    return f"{' and '.join(found)} dB"


def noise(choice: Choice, sides: Sides) -> float:
    """Return the noise that a choice adds, relative to the signal: of both operands, each the mean of the measures."""
    total = 0.0
    for side, operand in (("left", choice.left), ("right", choice.right)):
        if operand is not None:
            total += sum(0.0 if x is None else 10 ** (-x / 10) for x in measures(sides[side], _cast(operand))) / 3
    return total


def _cast(operand: Operand) -> str:
    return f"{operand.format} {operand.granularity}"
