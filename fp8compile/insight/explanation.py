"""Explanation: what the compiler did with a model, to be read in a terminal, in a notebook, or by a program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fp8compile.errors import unknown_name
from fp8compile.insight.tables.all_graphs import AllGraphs
from fp8compile.insight.tables.html import explanation_html
from fp8compile.insight.tables.optimizer_text import others
from fp8compile.insight.tables.overview import overview_text
from fp8compile.insight.tables.text import TABLES, full_text, table_text
from fp8compile.insight.tables.totals import Totals, bytes_before, flops, totals
from fp8compile.plan.from_json import plans_from_json
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Operand


@dataclass
class Explanation(AllGraphs):
    """The plans of one or several graphs (a graph break makes several).

    `print` shows one screen, for a model of any depth; `table` the rows of one table, repeated layers as one; in a
    notebook it shows all tables as HTML. `rows` gives plain rows: `pandas.DataFrame(explanation.rows("saved"))`.
    `to_json` and `from_json` are inverse to each other; what `to_json` gives can be edited and handed back as
    options={"plan": …} (`fp8compile/plan/overrides.py`). It has the tables of a `Plan` too: those of all graphs, one
    after the other.
    """

    plans: list[Plan]

    @property
    def totals(self) -> Totals:
        """Sums over all graphs: shares of FLOPs, bytes, counts of reasons."""
        return totals(self.plans)

    def table(self, name: str) -> str:
        """Return one table as text of at most 120 columns, repeated layers as one; names are those of `rows`.

        Raises `OptionError` for an unknown name.
        """
        return table_text(self.plans, name)

    def full_text(self) -> str:
        """Return the totals and all tables of all graphs as text of at most 120 columns."""
        return full_text(self.plans)

    def rows(self, table: str = "matmuls") -> list[dict[str, Any]]:
        """Return a flat dictionary for each row of a `table`.

        matmuls; saved: tensors kept for backward; recomputed: values that backward computes again; kernels; losses:
        those with large logits; masks: those of attention that are not made; transfers: what ranks hand each other;
        groups: of an optimizer's parameters, with a column for each hyperparameter; states: of an optimizer; updates:
        parameters that are updated together.
        `graph` is the index of its plan. Matmuls also have `flops`, saved tensors `bytes_before`.
        """
        if table not in TABLES:
            raise unknown_name("table", table, TABLES)
        return [{"graph": i, **row} for i, plan in enumerate(self.plans) for row in _rows(plan, table)]

    def to_json(self) -> str:
        """Return all plans and the totals as JSON text."""
        data = {"totals": {**asdict(self.totals), "share": self.totals.share}}
        return json.dumps({**data, "plans": [json.loads(plan.to_json()) for plan in self.plans]}, indent=1)

    @staticmethod
    def from_json(text: str) -> Explanation:
        """Return the explanation that `to_json` wrote, or that of a single plan. Raises `OptionError`."""
        return Explanation(plans_from_json(text))

    def __str__(self) -> str:
        return overview_text(self.plans)

    def __repr__(self) -> str:
        t = self.totals
        return (
            f"<Explanation of {t.graphs} graphs: {t.fp8} of {t.matmuls} matmuls in FP8, {t.share:.1%} of their FLOPs>"
        )

    def _repr_html_(self) -> str:
        return explanation_html(self.plans)


def _rows(plan: Plan, table: str) -> Iterator[dict[str, Any]]:
    if table == "matmuls":
        for row in plan.matmuls:
            yield {**_flat(asdict(row), row.left, row.right), "source": plan.line(row), "flops": flops(row, plan)}
    elif table == "saved":
        for row in plan.saved:
            yield {**_joined(asdict(row)), "source": plan.line(row), "bytes_before": bytes_before(row, plan)}
    elif table == "groups":
        for row in plan.groups:
            told = {**asdict(row), "others": "; ".join(others(row))}
            yield {**told.pop("settings"), **told}
    elif table == "recomputed":
        for row in plan.restored:
            yield {**_joined(asdict(row)), "source": plan.line(row)}
    else:
        for row in getattr(plan, table):
            yield _joined(asdict(row))


def _flat(row: dict[str, Any], left: Operand | None, right: Operand | None) -> dict[str, Any]:
    """Return a matmul's row with operands as text: "e4m3 row"."""
    return _joined(row) | {"left": str(left) if left else "", "right": str(right) if right else ""}


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    lists = {k: [f"{name}: {x}" for name, x in v.items()] if isinstance(v, dict) else v for k, v in row.items()}
    return {k: ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for k, v in lists.items()}
