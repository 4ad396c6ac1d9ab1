"""An optimizer as text for a terminal: its groups of parameters, its states, its updates."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8compile.insight.tables.grouping import alike, state_groups
from fp8compile.insight.tables.numbers import WIDTH, counted, si, size
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Group

FIRST = ("lr", "betas", "momentum", "weight_decay", "eps")  # hyperparameters in the order in which people ask for them
UNSAID = ("foreach", "fused", "capturable", "differentiable", "initial_lr")  # how a step runs, not what it computes


def groups_table(plan: Plan) -> Iterator[str]:
    """Yield the groups of an optimizer's parameters, with settings and bytes of states."""
    titles = ("group", "parameters", "in 8 bits", "states")
    rows = [
        (str(g.group), f"{g.parameters} of {si(g.elements)}elements", str(g.in_8_bits), _change(g.before, g.after))
        for g in plan.groups
    ]
    widths = [2 + max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    if plan.groups:
        yield _cells(titles, widths) + "settings"
    for row, g in zip(rows, plan.groups, strict=True):
        yield from _wrapped(_cells(row, widths), settings(g))
        yield from _wrapped(_cells(("", "", "not:"), widths[:3]), "; ".join(others(g))) if g.others else ()


def _cells(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "    " + "".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))


def _change(before: int, after: int) -> str:
    return f"{size(before)} → {size(after)}"


def settings(row: Group) -> str:
    """Return the hyperparameters as "lr 0.001, betas (0.9, 0.999)"; those that are off are left out."""
    known: Mapping[str, Any] = row.settings
    names = [n for n in FIRST if n in known] + [n for n in known if n not in (*FIRST, *UNSAID)]
    said = [n for n in names if known[n] is not None and known[n] is not False]
    return ", ".join(n if known[n] is True else f"{n} {_number(known[n])}" for n in said)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def others(row: Group) -> list[str]:
    """Return why parameters of a group have no states in 8 bits, with counts; reasons that differ in sizes are one."""
    return [f"{count}× {why}" for why, count in alike(row.others).items()]


def states_table(plan: Plan) -> Iterator[str]:
    """Yield the states of an optimizer by name, format and reason."""
    titles = ("state of the optimizer", "as", "bytes")
    groups = state_groups(plan)
    rows = [(f"{g.first.name} ×{g.count}", g.first.format or g.first.dtype, _change(g.before, g.after)) for g in groups]
    widths = [2 + max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    if groups:
        yield _cells(titles, widths) + "reason"
    for row, g in zip(rows, groups, strict=True):
        yield from _wrapped(_cells(row, widths), g.reason)


def updates_table(plan: Plan) -> Iterator[str]:
    """Yield the parameters that are updated together, and why others are not."""
    for update in plan.updates:
        what = f"{counted(update.parameters, 'parameter')}, {si(update.elements)}elements"
        if update.reason:
            yield from _wrapped(f"    {what}: ", update.reason)
        else:
            formats = ", ".join(sorted(set(update.formats))) or "no state in 8 bits"
            yield from _wrapped("    updated together: ", f"{what}, {update.values} values; {formats}")


def _wrapped(start: str, text: str) -> Sequence[str]:
    """Return `text` after `start`, its further lines below its first one."""
    lines = textwrap.wrap(text, max(20, WIDTH - len(start))) or [""]
    return [f"{start if i == 0 else ' ' * len(start)}{line}".rstrip() for i, line in enumerate(lines)]
