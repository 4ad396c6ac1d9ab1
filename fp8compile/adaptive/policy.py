"""The policy of the automatic mode: from what was measured of each cast, which matmuls and saved tensors change theirs.

Decides only; `fp8compile/adaptive/adaptive_graph.py` measures and recompiles. A matmul has these choices, cheapest
first:

    as the recipe has it · tensor × tensor · row × tensor, tensor × row · row × row · group × group · BF16

It takes the first choice with which both operands keep what the settings demand, and changes only where it does not
keep that now. It returns to a cheaper choice, never below the recipe's, that would keep `margin` more at `patience`
looks in a row. A grouped matmul has two choices, the recipe's (rows) and BF16.
A saved tensor has two choices: FP8 as the compiler would keep it, and its own dtype, where it then stays: kept as it is
it has no cast to measure.

Rules: the first and the last layer, and products of two activations, must keep `edges` more. Such a product (SwiGLU in
front of its down projection) has outlier channels that grow in training: they lie along the contracted dimension, where
rows separate nothing, so it never stops at rows. A few tokens far above the rest (attention sinks) show as few rows
with all of the signal: `by_rows` drops, and scales of rows are the first choice that is offered.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fp8compile.adaptive.settings import Adaptive
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import ADAPTED, Reason
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand, Saved

Key: TypeAlias = tuple[str, str, int]  # module path, role, occurrence
GROUP = "e4m3 group(128)"
COARSE = (("tensor", "tensor"), ("row", "tensor"), ("tensor", "row"), ("row", "row"))


@dataclass(frozen=True)
class Choice:
    """A way in which a matmul may run; without casts: in BF16."""

    left: Operand | None = None
    right: Operand | None = None
    fast_accumulation: bool = False

    def __str__(self) -> str:
        return BF16 if self.left is None else f"{self.left} × {self.right}"


@dataclass(frozen=True)
class Change:
    """A matmul or a saved tensor (role "saved") that changed: at which step, from what to what, and why.

    is_cheaper: it returned to a cheaper choice that would have kept enough.
    """

    step: int
    path: str
    role: str
    before: str
    after: str
    evidence: str
    is_cheaper: bool = False

    def __str__(self) -> str:
        where = f"{self.path or '(the model itself)'} {self.role}"
        return f"step {self.step}: {where}: {self.before} → {self.after}: {self.evidence}"


@dataclass
class Policy:
    """The policy for one graph, with what it knows of its matmuls between looks.

    baselines: by member, how the plan had it at first. cheaper_looks: at how many looks in a row a cheaper choice
    would have kept enough.
    """

    settings: Adaptive
    grouped: bool = True  # whether the device has matmuls with groups
    baselines: dict[Key, Choice] = field(default_factory=dict)
    cheaper_looks: Counter[Key] = field(default_factory=Counter)

    def start_from(self, plan: Plan) -> None:
        """Take the plan that the recipe gave for the baseline."""
        for row, _, members in keyed(plan.matmuls):
            for member in members:
                self.baselines.setdefault(member, _choice(row))

    def look(self, plan: Plan, measured: Sequence[Row], step: int) -> tuple[Plan, list[Change]]:
        """Return the plan as it should be, and the changes that make it so."""
        known: dict[Key, dict[str, Row]] = {}
        for m in measured:
            known.setdefault((m.path, m.role, m.occurrence), {})[m.side] = m
        edges = outermost(row.path for row in plan.matmuls if row.role == "output")
        changes: list[Change] = []
        rows = []
        for row, key, members in keyed(plan.matmuls):
            sides = known.get(key, {})
            after, why = _choice(row), ""
            if set(sides) == {"left", "right"} and members[0] in self.baselines:
                after, why = self._choose(row, members, sides, row.path in edges)
            if why:
                before = _choice(row)
                cheaper = _cost(after) < _cost(before)
                changes.append(Change(step, row.path, row.role, str(before), str(after), why, cheaper))
                row = _changed(row, after, why)
            rows.append(row)
        saved = [self._saved(row, key, measured, step, changes) for row, key in _saved_keys(plan.saved)]
        return replace(plan, matmuls=rows, saved=saved), changes

    # ---- matmuls ------------------------------------------------------------------------------------------------

    def _choose(self, row: Matmul, members: Sequence[Key], sides: Mapping[str, Row], edge: bool) -> tuple[Choice, str]:
        """Return the choice for a matmul, and why if it is another one."""
        now, baseline = _choice(row), self.baselines[members[0]]
        activations = [sides["right"]] if row.role == "grad_weight" else list(sides.values())
        product = row.role != "grad_input" and any(m.trait == "product" for m in activations)
        more = self.settings.edges if edge or product else 0.0
        choices = [*dict.fromkeys((baseline, Choice()))] if row.kind == "grouped" else self._choices(baseline, product)
        place = choices.index(now) if now in choices else len(choices)
        worst = _worst(now, sides, self.settings, more)
        if now.left is not None and worst is not None:
            self.cheaper_looks[members[0]] = 0
            fits = (c for c in choices if c != now and _worst(c, sides, self.settings, more) is None)
            after = next(fits, Choice())
            rules = " (first or last layer)" * edge + " (a product of activations)" * product
            return after, worst + rules
        cheaper = [c for c in choices[:place] if _worst(c, sides, self.settings, more + self.settings.margin) is None]
        self.cheaper_looks[members[0]] = self.cheaper_looks[members[0]] + 1 if cheaper else 0
        if self.cheaper_looks[members[0]] < self.settings.patience:
            return now, ""
        self.cheaper_looks[members[0]] = 0
        return cheaper[0], f"{self.settings.patience} looks in a row it would have kept {_kept(cheaper[0], sides)}"

    def _choices(self, baseline: Choice, product: bool) -> list[Choice]:
        """Return all choices from the baseline on, cheapest first."""
        choices = [baseline]
        for left, right in COARSE:
            if not (product and "row" in (left, right)):
                choices.append(Choice(Operand("e4m3", left), Operand("e4m3", right), baseline.fast_accumulation))
        if self.grouped:
            choices.append(Choice(Operand("e4m3", "group(128)"), Operand("e4m3", "group(128)")))
        if baseline.left is None:
            return [baseline]
        kept = [c for c in choices if c == baseline or _cost(c) >= _cost(baseline)]
        return [*dict.fromkeys(kept), Choice()]

    # ---- saved tensors ------------------------------------------------------------------------------------------

    def _saved(self, row: Saved, key: Key, measured: Sequence[Row], step: int, changes: list[Change]) -> Saved:
        found = [m for m in measured if m.role == "saved" and (m.path, m.side, m.occurrence) == key]
        if row.form == row.dtype or not found:
            return row
        why = _short(found[0], found[0].cast, self.settings, 0.0)
        if why is None:
            return row
        changes.append(Change(step, row.path, "saved", row.form, row.dtype, why))
        return replace(row, form=row.dtype, reason=ADAPTED + why, code=Reason.ADAPTIVE)


def _saved_keys(rows: Iterable[Saved]) -> Iterator[tuple[Saved, tuple[str, str, int]]]:
    """Yield (row, (path, rest of its key as the pass writes it, occurrence))."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        rest = json.dumps([row.source, row.dtype, row.shape[-1] if row.shape else 1])
        yield row, (row.path, rest, seen[row.path, rest])
        seen[row.path, rest] += 1


# ---- choices --------------------------------------------------------------------------------------------------------


def keyed(rows: Iterable[Matmul]) -> Iterator[tuple[Matmul, Key, list[Key]]]:
    """Yield (row, its key, the keys of what it was merged of), as statistics and given plans count them."""
    own: Counter[tuple[str, str]] = Counter()
    members: Counter[tuple[str, str]] = Counter()
    for row in rows:
        paths = row.merged or (row.path,)
        yield row, (row.path, row.role, own[row.path, row.role]), [(p, row.role, members[p, row.role]) for p in paths]
        own[row.path, row.role] += 1
        members.update((p, row.role) for p in paths)


def _choice(row: Matmul) -> Choice:
    return Choice(row.left, row.right, row.fast_accumulation) if row.decision == FP8 else Choice()


def _changed(row: Matmul, choice: Choice, why: str) -> Matmul:
    decision = FP8 if choice.left is not None else BF16
    return replace(
        row, decision=decision, reason=ADAPTED + why, code=Reason.ADAPTIVE, remarks=(), left=choice.left,
        right=choice.right, fast_accumulation=choice.fast_accumulation,
    )  # fmt: skip


def _cost(choice: Choice) -> int:
    """Return the rank of a choice: 0 to 2 by its scales of rows, 3 with groups, 4 for BF16."""
    if choice.left is None or choice.right is None:
        return 4
    kinds = [o.granularity for o in (choice.left, choice.right)]
    return 3 if any(k.startswith(("group", "block")) for k in kinds) else kinds.count("row")


def outermost(paths: Iterable[str]) -> set[str]:
    """Return the paths of the first and the last layer: those with the least and the greatest number in the outermost
    list of modules; where no path has a number, the first and the last path."""
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


def _worst(choice: Choice, sides: Mapping[str, Row], settings: Adaptive, more: float) -> str | None:
    """Return what an operand does not keep with a choice; None if both keep all that is demanded."""
    for side, operand in (("left", choice.left), ("right", choice.right)):
        cast = f"{operand.format} {operand.granularity}" if operand is not None else None
        why = _short(sides[side], cast, settings, more) if cast is not None else None
        if why is not None:
            return f"{side} operand: {why}"
    return None


def _short(row: Row, cast: str, settings: Adaptive, more: float) -> str | None:
    """Return what a cast loses more of than it may; None if nothing."""
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


def _kept(choice: Choice, sides: Mapping[str, Row]) -> str:
    """Return the least that each operand keeps with a choice, by any of the three measures."""
    found = []
    for side, operand in (("left", choice.left), ("right", choice.right)):
        known = f"{operand.format} {operand.granularity}" if operand is not None else ""
        values = [v for v in (sides[side].what_if.get(known), *sides[side].evenly.get(known, ())) if v is not None]
        found.append(f"{min(values):.1f}" if values else "-")
    return f"{' and '.join(found)} dB"
