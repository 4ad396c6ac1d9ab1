"""Tables of rows of figures: as text while a benchmark runs, as Markdown for pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MISSING = "–"


@dataclass
class Row:
    """Figures of one system on one model; `note` says why there are none."""

    model: str
    system: str
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.figures.get(key, default)


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and the text of a row's cell, given the row to compare with (or None)."""

    head: str
    cell: Callable[[Row, Row | None], str]


def figure(head: str, key: str, form: str = ".1f") -> Column:
    """Return a figure as it was measured."""
    return Column(head, lambda row, _: MISSING if row.get(key) is None else format(row.get(key), form))


def ratio(head: str, key: str, inverse: bool = False) -> Column:
    """Return how much less than the baseline's a figure is (or, `inverse`, what share of it)."""

    def cell(row: Row, baseline: Row | None) -> str:
        ours, theirs = row.get(key), baseline.get(key) if baseline else None
        if not ours or not theirs:
            return MISSING
        return f"{ours / theirs:.2f}" if inverse else f"{theirs / ours:.2f}×"

    return Column(head, cell)


def cells(columns: Sequence[Column], row: Row, baseline: Row | None) -> list[str]:
    return [column.cell(row, baseline) for column in columns]


def baseline_of(rows: Sequence[Row], model: str, system: str) -> Row | None:
    """Return the row of `system` on `model`, if it was measured."""
    return next((r for r in rows if (r.model, r.system) == (model, system) and not r.note), None)


def text_head(columns: Sequence[Column], width: int) -> str:
    return " " * width + "".join(f"{c.head:>{_width(c)}}" for c in columns)


def text_line(columns: Sequence[Column], width: int, row: Row, baseline: Row | None) -> str:
    name = f"{row.model}: {row.system}"
    if row.note and not row.figures:
        return f"{name:{width}}  {row.note}"
    line = "".join(f"{cell:>{_width(c)}}" for c, cell in zip(columns, cells(columns, row, baseline), strict=True))
    return f"{name:{width}}{line}  {row.note}".rstrip()


def _width(column: Column) -> int:
    return max(len(column.head), 8) + 2


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table; lines end in a newline."""
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
