"""All tables of plans as text for a terminal: at most 120 columns, repeated layers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fp8compile.errors import unknown_name
from fp8compile.insight.tables.cells import cut
from fp8compile.insight.tables.model_tables import (
    kernels_table,
    losses_table,
    masks_table,
    matmuls_table,
    restored_table,
    saved_table,
    transfers_table,
)
from fp8compile.insight.tables.optimizer_text import groups_table, states_table, updates_table
from fp8compile.insight.tables.summary import summary, title
from fp8compile.insight.tables.totals import totals
from fp8compile.plan.plan import Plan

TABLES: Mapping[str, Callable[[Plan], Iterator[str]]] = {
    "matmuls": matmuls_table,
    "losses": losses_table,
    "masks": masks_table,
    "transfers": transfers_table,
    "saved": saved_table,
    "recomputed": restored_table,
    "kernels": kernels_table,
    "groups": groups_table,
    "states": states_table,
    "updates": updates_table,
}
IN_THE_SUMMARY = ("losses", "masks")


def full_text(plans: Sequence[Plan]) -> str:
    """Return totals and tables of all graphs, ending in a newline."""
    if not plans:
        return "fp8: nothing has been compiled.\n"
    blocks = []
    if len(plans) > 1:
        blocks.append("\n".join([f"all {len(plans)} graphs", *summary(totals(plans))]) + "\n")
    return "\n".join([*blocks, *(_all_tables(plan, _prefix(i, plans)) for i, plan in enumerate(plans))])


def table_text(plans: Sequence[Plan], name: str) -> str:
    """Return one table of all graphs, ending in a newline. Raises `OptionError` for an unknown name."""
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    blocks = []
    for i, plan in enumerate(plans):
        if body := list(TABLES[name](plan)):
            heading = [cut(_prefix(i, plans) + title(plan))] if len(plans) > 1 else []
            blocks.append(_joined([*heading, *body]))
    return "\n".join(blocks) or f"no {name}\n"


def _all_tables(plan: Plan, prefix: str) -> str:
    lines = [cut(prefix + title(plan)), *summary(totals([plan]))]
    for name, table in TABLES.items():
        body = list(table(plan)) if name not in IN_THE_SUMMARY else []
        lines += ["", *body] if body else []
    return _joined(lines)


def _prefix(index: int, plans: Sequence[Plan]) -> str:
    return f"graph {index}: " if len(plans) > 1 else ""


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"
