"""Moves of an automatic schedule: from what was measured of each cast, which matmuls and saved tensors change theirs.

Decides only; `fp8compile/adaptive/versions.py` measures and recompiles. A matmul stands on a ladder, cheapest first:

    home (as the recipe has it) · tensor × tensor · row × tensor, tensor × row · row × row · group × group · BF16

It moves to the first rung on which both operands keep what the settings demand, and only where it does not keep that
now. It returns to a cheaper rung, never below home, which would keep `margin` more at `patience` looks in a row.
A grouped matmul has two rungs, home (rows) and BF16.
A saved tensor has two rungs: FP8 as the compiler would keep it, and its own dtype, where it then stays: kept as it is
it has no cast to measure.

Rules: the first and the last layer, and products of two activations, must keep `edges` more. Such a product (SwiGLU in
front of its down projection) has outlier channels that grow in training: they lie along the contracted dimension, where
rows separate nothing, so it never stops at rows. A few tokens far above the rest (attention sinks) show as few rows
with all of the signal: `by_rows` drops, and rows are what the ladder offers first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fp8compile.adaptive.settings import Schedule
from fp8compile.plan.cast_statistics import Row
from fp8compile.plan.overrides import SCHEDULED
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand, Saved

Key: TypeAlias = tuple[str, str, int]  # module path, role, occurrence
GROUP = "e4m3 group(128)"
COARSE = (("tensor", "tensor"), ("row", "tensor"), ("tensor", "row"), ("row", "row"))


@dataclass(frozen=True)
class Rung:
    """How a matmul may run; without casts: in BF16."""

    left: Operand | None = None
    right: Operand | None = None
    fast_accumulation: bool = False

    def __str__(self) -> str:
        return BF16 if self.left is None else f"{self.left} × {self.right}"


@dataclass(frozen=True)
class Move:
    """A matmul or a saved tensor (role "saved") that changed: at which step, from what to what, and why."""

    step: int
    path: str
    role: str
    before: str
    after: str
    evidence: str

    def __str__(self) -> str:
        where = f"{self.path or '(the model itself)'} {self.role}"
        return f"step {self.step}: {where}: {self.before} → {self.after}: {self.evidence}"


@dataclass
class Ladders:
    """What is known of the matmuls of one graph between looks.

    homes: by member, how the plan had it at first. patient: how many looks in a row a cheaper rung would have served.
    """

    settings: Schedule
    grouped: bool = True  # whether the device has matmuls with groups
    homes: dict[Key, Rung] = field(default_factory=dict)
    patient: Counter[Key] = field(default_factory=Counter)

    def settle(self, plan: Plan) -> None:
        """Learn the homes from the plan that the recipe gave."""
        for row, _, members in keyed(plan.matmuls):
            for member in members:
                self.homes.setdefault(member, _rung(row))

    def look(self, plan: Plan, measured: Sequence[Row], step: int) -> tuple[Plan, list[Move]]:
        """The plan as it should be, and the moves that make it so."""
        known: dict[Key, dict[str, Row]] = {}
        for m in measured:
            known.setdefault((m.path, m.role, m.occurrence), {})[m.side] = m
        edges = outermost(row.path for row in plan.matmuls if row.role == "output")
        moves: list[Move] = []
        rows = []
        for row, key, members in keyed(plan.matmuls):
            sides = known.get(key, {})
            after, why = _rung(row), ""
            if set(sides) == {"left", "right"} and members[0] in self.homes:
                after, why = self._choose(row, members, sides, row.path in edges)
            if why:
                moves.append(Move(step, row.path, row.role, str(_rung(row)), str(after), why))
                row = _moved(row, after, why)
            rows.append(row)
        saved = [self._saved(row, key, measured, step, moves) for row, key in _saved_keys(plan.saved)]
        return replace(plan, matmuls=rows, saved=saved), moves

    # ---- matmuls ------------------------------------------------------------------------------------------------

    def _choose(self, row: Matmul, members: Sequence[Key], sides: Mapping[str, Row], edge: bool) -> tuple[Rung, str]:
        """The rung for a matmul, and why if it is another one."""
        now, home = _rung(row), self.homes[members[0]]
        activations = [sides["right"]] if row.role == "grad_weight" else list(sides.values())
        product = row.role != "grad_input" and any(m.trait == "product" for m in activations)
        more = self.settings.edges if edge or product else 0.0
        ladder = [*dict.fromkeys((home, Rung()))] if row.kind == "grouped" else self._ladder(home, product)
        place = ladder.index(now) if now in ladder else len(ladder)
        worst = _worst(now, sides, self.settings, more)
        if now.left is not None and worst is not None:
            self.patient[members[0]] = 0
            fits = (r for r in ladder if r != now and _worst(r, sides, self.settings, more) is None)
            after = next(fits, Rung())
            rules = " (first or last layer)" * edge + " (a product of activations)" * product
            return after, worst + rules
        cheaper = [r for r in ladder[:place] if _worst(r, sides, self.settings, more + self.settings.margin) is None]
        self.patient[members[0]] = self.patient[members[0]] + 1 if cheaper else 0
        if self.patient[members[0]] < self.settings.patience:
            return now, ""
        self.patient[members[0]] = 0
        return cheaper[0], f"{self.settings.patience} looks in a row it would have kept {_kept(cheaper[0], sides)}"

    def _ladder(self, home: Rung, product: bool) -> list[Rung]:
        """All rungs from home on, cheapest first."""
        rungs = [home]
        for left, right in COARSE:
            if not (product and "row" in (left, right)):
                rungs.append(Rung(Operand("e4m3", left), Operand("e4m3", right), home.fast_accumulation))
        if self.grouped:
            rungs.append(Rung(Operand("e4m3", "group(128)"), Operand("e4m3", "group(128)")))
        rungs = rungs[:1] if home.left is None else [r for r in rungs if r == home or _cost(r) >= _cost(home)]
        return [*dict.fromkeys(rungs), *([Rung()] if home.left is not None else [])]

    # ---- saved tensors ------------------------------------------------------------------------------------------

    def _saved(self, row: Saved, key: Key, measured: Sequence[Row], step: int, moves: list[Move]) -> Saved:
        found = [m for m in measured if m.role == "saved" and (m.path, m.side, m.occurrence) == key]
        if row.form == row.dtype or not found:
            return row
        why = _short(found[0], found[0].cast, self.settings, 0.0)
        if why is None:
            return row
        moves.append(Move(step, row.path, "saved", row.form, row.dtype, why))
        return replace(row, form=row.dtype, reason=SCHEDULED + why)


def _saved_keys(rows: Iterable[Saved]) -> Iterator[tuple[Saved, tuple[str, str, int]]]:
    """(row, (path, rest of its key as the pass writes it, occurrence))."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        rest = json.dumps([row.source, row.dtype, row.shape[-1] if row.shape else 1])
        yield row, (row.path, rest, seen[row.path, rest])
        seen[row.path, rest] += 1


# ---- rungs ----------------------------------------------------------------------------------------------------------


def keyed(rows: Iterable[Matmul]) -> Iterator[tuple[Matmul, Key, list[Key]]]:
    """(row, its key, the keys of what it was merged of), as statistics and given plans count them."""
    own: Counter[tuple[str, str]] = Counter()
    members: Counter[tuple[str, str]] = Counter()
    for row in rows:
        paths = row.merged or (row.path,)
        yield row, (row.path, row.role, own[row.path, row.role]), [(p, row.role, members[p, row.role]) for p in paths]
        own[row.path, row.role] += 1
        members.update((p, row.role) for p in paths)


def _rung(row: Matmul) -> Rung:
    return Rung(row.left, row.right, row.fast_accumulation) if row.decision == FP8 else Rung()


def _moved(row: Matmul, rung: Rung, why: str) -> Matmul:
    decision = FP8 if rung.left is not None else BF16
    return replace(
        row, decision=decision, reason=SCHEDULED + why, left=rung.left, right=rung.right,
        fast_accumulation=rung.fast_accumulation,
    )  # fmt: skip


def _cost(rung: Rung) -> int:
    """0 to 2: scales of rows; 3: groups."""
    if rung.left is None or rung.right is None:
        return 4
    kinds = [o.granularity for o in (rung.left, rung.right)]
    return 3 if any(k.startswith(("group", "block")) for k in kinds) else kinds.count("row")


def outermost(paths: Iterable[str]) -> set[str]:
    """The paths of the first and the last layer: those with the least and the greatest number in the outermost list of
    modules; where no path has a number, the first and the last path."""
    listed = list(paths)
    numbered = {p: (m[1], int(m[2])) for p in listed if (m := re.match(r"(.*?)(?:^|\.)(\d+)(?=\.|$)", p))}
    if not numbered:
        return set(listed[:1] + listed[-1:])
    ends = {}
    for name, number in numbered.values():
        low, high = ends.get(name, (number, number))
        ends[name] = min(low, number), max(high, number)
    return {p for p, (name, number) in numbered.items() if number in ends[name]}


# ---- evidence -------------------------------------------------------------------------------------------------------


def _worst(rung: Rung, sides: Mapping[str, Row], settings: Schedule, more: float) -> str | None:
    """What an operand does not keep on a rung; None if both keep all that is demanded."""
    for side, operand in (("left", rung.left), ("right", rung.right)):
        cast = f"{operand.format} {operand.granularity}" if operand is not None else None
        why = _short(sides[side], cast, settings, more) if cast is not None else None
        if why is not None:
            return f"{side} operand: {why}"
    return None


def _short(row: Row, cast: str, settings: Schedule, more: float) -> str | None:
    """What a cast loses more of than it may; None if nothing."""
    if cast == row.cast:
        sqnr, even = row.sqnr, (row.by_rows, row.by_columns)
    else:  # blocks of a weight lie between a tensor and groups; nothing is measured of them unless they are in use
        known = cast if cast in row.what_if else f"{cast.split(' ')[0]} tensor"
        sqnr, even = row.what_if[known], row.evenly[known]
    rest = f"amax {row.amax:.3g}, {row.underflown:.1%} underflow"
    if sqnr is not None and sqnr < settings.minimum + more:
        return f"SQNR {sqnr:.1f} dB of {settings.minimum + more:g}, {rest}"
    for name, value in zip(("rows", "columns"), even, strict=True):
        if value is not None and value < settings.even + more:
            what = "a few rows hide the rest" if name == "rows" else "outlier channels"
            return f"{what}: by {name} {value:.1f} dB of {settings.even + more:g}, {rest}"
    return None


def _kept(rung: Rung, sides: Mapping[str, Row]) -> str:
    """The least of what an operand keeps on a rung, by any of the three measures."""
    found = []
    for side, operand in (("left", rung.left), ("right", rung.right)):
        known = f"{operand.format} {operand.granularity}" if operand is not None else ""
        values = [v for v in (sides[side].what_if.get(known), *sides[side].evenly.get(known, ())) if v is not None]
        found.append(f"{min(values):.1f}" if values else "-")
    return f"{' and '.join(found)} dB"
