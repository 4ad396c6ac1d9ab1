"""Statistics of casts as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from fp8compile.insight.tables.cells import end_of
from fp8compile.plan.cast_rows import ALTERNATIVES, Row


def statistics_text(rows: Sequence[Row]) -> str:
    """Return rows of `fp8compile.plan.cast_rows` as a table, the worst SQNR first, ending in a newline."""
    formats = [c.split(" ")[0] for c in ALTERNATIVES]
    names = [c.split(" ")[1].replace("group", "g") for c in ALTERNATIVES]
    first = [f if i == 0 or formats[i - 1] != f else "" for i, f in enumerate(formats)]
    width = max([15, *(len(_cast(row)) for row in rows)])
    room = 36 + 15 - width  # so that all of it fits a terminal
    lines = [
        f"{'':74}what if: SQNR in dB as",
        f"{'operand':<{room}}{'cast':<{width}} SQNR    amax  under    sat" + "".join(f" {f:>6}" for f in first),
        " " * 74 + "".join(f" {n:>6}" for n in names),
    ]
    for row in sorted(rows, key=lambda r: 1e9 if r.sqnr is None else r.sqnr):
        others = "".join(f" {_number(row.what_if.get(c)):>6}" for c in ALTERNATIVES)
        shares = f"{row.underflown:>6.1%} {row.saturated:>6.1%}"
        start = f"{_operand(row, room - 1):<{room}}{_cast(row):<{width}}"
        lines.append(f"{start}{_number(row.sqnr):>5} {row.amax:>7.2g} {shares}{others}")
        if row.skipped:
            lines.append(
                f"{'':37}{row.skipped} of {row.steps + row.skipped} executions were not finite, and are left out"
            )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cast(row: Row) -> str:
    return f"{row.cast} delayed({row.delayed})" if row.delayed else row.cast


def _operand(row: Row, room: int) -> str:
    """Return path, role and side in `room` columns; of a long path, its end."""
    rest = f" {row.role} {row.side}"
    return end_of(row.path or "(the model itself)", room - len(rest)) + rest


def _number(decibels: float | None) -> str:
    return "-" if decibels is None else f"{decibels:.1f}"
