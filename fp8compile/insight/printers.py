"""The printers of plans and statistics, which the front door registers, since plans import no tables."""

from __future__ import annotations

from typing import Any

from fp8compile.insight.explanation import Explanation
from fp8compile.insight.tables.statistics_text import statistics_text
from fp8compile.insight.tables.summary import one_line
from fp8compile.plan.plan import Plan
from fp8compile.plan.printers import printers


def register_printers() -> None:
    """Let `print(plan)`, a notebook, the log and `print(statistics)` use the tables."""
    printers.text = lambda plan: str(Explanation([plan]))
    printers.line = one_line
    printers.html = lambda plan: Explanation([plan])._repr_html_()
    printers.table = _table
    printers.rows = _rows
    printers.statistics = statistics_text


def _table(plan: Plan, name: str) -> str:
    return Explanation([plan]).table(name)


def _rows(plan: Plan, table: str) -> list[dict[str, Any]]:
    return Explanation([plan]).rows(table)
