"""The policy of the automatic mode: from what was measured of each cast, which matmuls and saved tensors change theirs.

Decides only; `fp8compile/adaptive/adaptive_graph.py` measures and recompiles. A matmul has these choices, cheapest
first:

    as the recipe has it · tensor × tensor · row × tensor, tensor × row · row × row · group × group · BF16

It takes the first choice with which both operands keep what the settings demand, and changes only where it does not
keep that now. It returns to a cheaper choice, never below the recipe's, that would keep `margin` more at `patience`
looks in a row; not to one that it had returned to before and that then lost too much. A grouped matmul has two choices,
the recipe's (rows) and BF16.
A saved tensor has two choices: FP8 as the compiler would keep it, and its own dtype, where it then stays: kept as it is
it has no cast to measure.

With a `budget` (recipe "auto") a matmul that keeps what is demanded also takes other casts where they add less noise,
as far as the budget of time reaches (`fp8compile/adaptive/best_casts.py`): at a look after 16 steps or more, then after
16 times as many as the last time. Less noise can wait, and compiling a large model takes as long as hundreds of steps.

Rules: the first and the last layer, and products of two activations, must keep `edges` more. Such a product (SwiGLU in
front of its down projection) has outlier channels that grow in training: they lie along the contracted dimension, where
rows separate nothing, so it never stops at rows. A few tokens far above the rest (attention sinks) show as few rows
with all of the signal: `by_rows` drops, and scales of rows are the first choice that is offered.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fp8compile.adaptive.best_casts import SPACING, WORTH, Way, all_choices, is_better, select, way, worthwhile
from fp8compile.adaptive.choices import (
    COARSE,
    GROUPS,
    Choice,
    Key,
    Sides,
    choice_of,
    kept,
    keyed,
    rank,
    short,
    worst,
)
from fp8compile.adaptive.settings import Adaptive
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import ADAPTED, CHOSEN, Reason
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand, Saved


@dataclass(frozen=True)
class Change:
    """A matmul or a saved tensor (role "saved") that changed: at which step, from what to what, and why.

    is_cheaper: it returned to a cheaper choice that would have kept enough. is_for_noise: it kept what was demanded
    before, and changed for less noise.
    """

    step: int
    path: str
    role: str
    before: str
    after: str
    evidence: str
    is_cheaper: bool = False
    is_for_noise: bool = False

    def __str__(self) -> str:
        where = f"{self.path or '(the model itself)'} {self.role}"
        return f"step {self.step}: {where}: {self.before} → {self.after}: {self.evidence}"


@dataclass(frozen=True)
class _Seen:
    """A matmul of which both operands were measured. edge: of the first or last layer; product: it reads a product of
    two activations; more: dB that it must keep beyond what others must."""

    row: Matmul
    key: Key
    sides: Sides
    edge: bool
    product: bool
    more: float


@dataclass
class Policy:
    """The policy for one graph, with what it knows of its matmuls between looks.

    baselines: by member, how the plan had it at first. cheaper_looks: at how many looks in a row a cheaper choice
    would have kept enough. returned: the cheaper choice that it returned to last. relapsed: those among them that then
    lost too much again. next_spending: the first step at which casts may change for less noise.
    """

    settings: Adaptive
    grouped: bool = True  # whether the device has matmuls with groups
    baselines: dict[Key, Choice] = field(default_factory=dict)
    cheaper_looks: Counter[Key] = field(default_factory=Counter)
    returned: dict[Key, Choice] = field(default_factory=dict)
    relapsed: dict[Key, set[Choice]] = field(default_factory=lambda: defaultdict(set))
    next_spending: int = SPACING

    def start_from(self, plan: Plan) -> None:
        """Take the plan that the recipe gave for the baseline."""
        for row, _, members in keyed(plan.matmuls):
            for member in members:
                self.baselines.setdefault(member, choice_of(row))

    def look(
        self, plan: Plan, measured: Sequence[Row], step: int, losses_alone: bool = False
    ) -> tuple[Plan, list[Change]]:
        """Return the plan as it should be, with what was seen in its reasons, and the changes that make it so.

        losses_alone: change what loses too much, and nothing for speed or less noise.
        """
        known: dict[Key, dict[str, Row]] = {}
        for m in measured:
            known.setdefault((m.path, m.role, m.occurrence), {})[m.side] = m
        edges = outermost(row.path for row in plan.matmuls if row.role == "output")
        changes: list[Change] = []
        rows, seen = [], []
        for row, key, members in keyed(plan.matmuls):
            sides = known.get(key, {})
            after, why = choice_of(row), ""
            if set(sides) == {"left", "right"} and members[0] in self.baselines:
                matmul = self._seen(row, members[0], sides, row.path in edges)
                after, why = self._choose(matmul, losses_alone)
                seen += [] if why else [(len(rows), matmul)]
            if why:
                row = _change(row, after, why, step, changes)
            rows.append(row)
        if self.settings.budget and not losses_alone:
            self._spend(rows, seen, step, changes)
        saved = [self._saved(row, key, measured, step, changes) for row, key in _saved_keys(plan.saved)]
        return replace(plan, matmuls=rows, saved=saved), changes

    # ---- matmuls ------------------------------------------------------------------------------------------------

    def _seen(self, row: Matmul, key: Key, sides: Sides, edge: bool) -> _Seen:
        activations = [sides["right"]] if row.role == "grad_weight" else list(sides.values())
        product = row.role != "grad_input" and any(m.trait == "product" for m in activations)
        return _Seen(row, key, sides, edge, product, self.settings.edges if edge or product else 0.0)

    def _choose(self, matmul: _Seen, losses_alone: bool) -> tuple[Choice, str]:
        """Return the choice for a matmul, and why if it is another one."""
        row, key, sides, more = matmul.row, matmul.key, matmul.sides, matmul.more
        now, baseline = choice_of(row), self.baselines[key]
        is_grouped = row.kind == "grouped"
        choices = [*dict.fromkeys((baseline, Choice()))] if is_grouped else self._choices(baseline, matmul.product)
        lost = worst(now, sides, self.settings, more)
        if now.left is not None and lost is not None and self.returned.get(key) == now:
            self.relapsed[key].add(now)
        choices = [c for c in choices if c == now or c not in self.relapsed[key]]
        place = choices.index(now) if now in choices else len(choices)
        if now.left is not None and lost is not None:
            self.cheaper_looks[key] = 0
            fits = (c for c in choices if c != now and worst(c, sides, self.settings, more) is None)
            rules = " (first or last layer)" * matmul.edge + " (a product of activations)" * matmul.product
            return next(fits, Choice()), lost + rules
        if self.settings.budget and now.left is not None:  # `_spend` compares it with all others
            return now, ""
        cheaper = [c for c in choices[:place] if worst(c, sides, self.settings, more + self.settings.margin) is None]
        self.cheaper_looks[key] = self.cheaper_looks[key] + 1 if cheaper else 0
        if self.cheaper_looks[key] < self.settings.patience or losses_alone:
            return now, ""
        self.cheaper_looks[key] = 0
        self.returned[key] = cheaper[0]
        return cheaper[0], f"{self.settings.patience} looks in a row it would have kept {kept(cheaper[0], sides)}"

    def _spend(self, rows: list[Matmul], seen: Sequence[tuple[int, _Seen]], step: int, changes: list[Change]) -> None:
        """Spend the budget: give the matmuls of `seen`, by their places in `rows`, the casts that add least noise."""
        weighed = [(place, *found) for place, matmul in seen if (found := self._ways(matmul)) is not None]
        if not weighed:
            return
        ways = [each for _, each, _ in weighed]
        fastest = sum(min(x.milliseconds for x in each) for each in ways)
        places = {place for place, _, _ in weighed}
        of_others = sum(_milliseconds(row) for i, row in enumerate(rows) if i not in places)
        wanted = select(ways, self.settings.budget * (fastest + of_others))
        if step < self.next_spending or not is_better([now for _, _, now in weighed], wanted):
            wanted = [now for _, _, now in weighed]
        else:
            self.next_spending = SPACING * step
        for (place, each, now), then in zip(weighed, wanted, strict=True):
            if then == now:
                rows[place] = _explained(rows[place], each, now)
            else:
                why = f"both operands together keep {now.decibels:.1f} → {then.decibels:.1f} dB, for {_more(now, then)}"
                rows[place] = _change(rows[place], then.choice, why, step, changes, is_for_noise=True)

    def _ways(self, matmul: _Seen) -> tuple[list[Way], Way] | None:
        """Return the ways that a matmul may run, and how it runs; None of one that has no choice."""
        row, sides = matmul.row, matmul.sides
        now, baseline = choice_of(row), self.baselines[matmul.key]
        if row.kind == "grouped" or now.left is None or baseline.left is None:
            return None
        found = {}
        for choice in dict.fromkeys((*all_choices(row, baseline, self.grouped), now)):
            fits = worst(choice, sides, self.settings, matmul.more) is None
            if fits and (known := way(row, choice, sides)) is not None:
                found[choice] = known
        if now not in found:
            return None
        return worthwhile(list(found.values()), found.get(baseline), found[now]), found[now]

    def _choices(self, baseline: Choice, product: bool) -> list[Choice]:
        """Return all choices from the baseline on, cheapest first."""
        choices = [baseline]
        for left, right in COARSE:
            if not (product and "row" in (left, right)):
                choices.append(Choice(Operand("e4m3", left), Operand("e4m3", right), baseline.fast_accumulation))
        if self.grouped:
            choices.append(Choice(Operand("e4m3", GROUPS[0]), Operand("e4m3", GROUPS[1])))
        if baseline.left is None:
            return [baseline]
        not_below = [c for c in choices if c == baseline or rank(c) >= rank(baseline)]
        return [*dict.fromkeys(not_below), Choice()]

    # ---- saved tensors ------------------------------------------------------------------------------------------

    def _saved(self, row: Saved, key: Key, measured: Sequence[Row], step: int, changes: list[Change]) -> Saved:
        found = [m for m in measured if m.role == "saved" and (m.path, m.side, m.occurrence) == key]
        if row.form == row.dtype or not found:
            return row
        why = short(found[0], found[0].cast, self.settings, 0.0)
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


# ---- rows -----------------------------------------------------------------------------------------------------------


def _change(
    row: Matmul, choice: Choice, why: str, step: int, changes: list[Change], is_for_noise: bool = False
) -> Matmul:
    """Return the row of a matmul that changes; note it in `changes`."""
    before = choice_of(row)
    is_cheaper = rank(choice) < rank(before)
    changes.append(Change(step, row.path, row.role, str(before), str(choice), why, is_cheaper, is_for_noise))
    decision = FP8 if choice.left is not None else BF16
    return replace(
        row, decision=decision, reason=ADAPTED + why, code=Reason.ADAPTIVE, remarks=(), left=choice.left,
        right=choice.right, fast_accumulation=choice.fast_accumulation,
    )  # fmt: skip


def _explained(row: Matmul, ways: Sequence[Way], now: Way) -> Matmul:
    """Return the row of a matmul that keeps its casts, with what others would keep in its reason."""
    text = f"both operands together keep {now.decibels:.1f} dB"
    least = min(ways, key=lambda x: x.noise)
    if least.noise > WORTH * now.noise:
        text += ", no other casts 1 dB more"
    else:
        text += f"; {least.choice} would keep {least.decibels:.1f} dB for {_more(now, least)}"
    return replace(row, reason=row.reason.partition(CHOSEN)[0] + CHOSEN + text)


def explain_again(plan: Plan, looked: Plan) -> None:
    """Write into a plan, compiled after a look, what that look said of the matmuls that keep their casts."""
    said = {key: row.reason.partition(CHOSEN)[1:] for row, key, _ in keyed(looked.matmuls)}
    for i, (row, key, _) in enumerate(keyed(plan.matmuls)):
        plan.matmuls[i] = replace(row, reason=row.reason + "".join(said.get(key, ())))


def _more(now: Way, then: Way) -> str:
    """Return how much longer a matmul takes, in words."""
    return f"{then.milliseconds - now.milliseconds:+.2g} ms of {now.milliseconds:.2g}"


def _milliseconds(row: Matmul) -> float:
    return (row.milliseconds_fp8 if row.decision == FP8 else row.milliseconds_bf16) or 0.0


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
