"""The plan: what the compiler decided of one graph, as plain data: rows of matmuls, saved tensors, kernels, …

The deciding passes write it, the rewriting passes only carry it out; reports and tests read it. `to_json` and
`from_json` are inverse to each other.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import sympy

from fp8compile.errors import OptionError
from fp8compile.plan.json_rows import made, parsed
from fp8compile.plan.printers import printers
from fp8compile.plan.read_rows import given_plans, plan_fields
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import (
    BF16,
    FP8,
    Group,
    Kernel,
    Loss,
    Lowered,
    Mask,
    Matmul,
    MergedUpdate,
    Recomputed,
    Saved,
    State,
    Transfer,
)


@dataclass
class Plan:
    """Rows for every matmul of one graph; `graph` says which (training, inference or optimizer), `failure` why
    nothing of it was carried out.

    `saved`: what the forward half keeps for the backward half, parameters left out; `recomputed`: how many nodes of
    each operator the backward half computes again; `restored`: which values it gets in that way.
    `halves`: what became of the forward, backward or inference graph, as far as it has been compiled (torch compiles
    backward when it is first needed). `states`, `groups`: those of an optimizer, and of its parameters; `traced`: why
    these are traced one by one, "" where one rule is traced for all that are alike.
    `losses`: what became of cross-entropies with large logits. `masks`: those of attention that are not made.
    `transfers`: what ranks hand each other for matmuls, and in which form.
    `hints`: symbolic sizes of rows → what they were when this was compiled. `called`: the user's line that compiled it.
    """

    graph: str = "training"
    recipe: str = ""
    device: str = ""
    matmuls: list[Matmul] = field(default_factory=list)
    failure: str = ""
    saved: list[Saved] = field(default_factory=list)
    recomputed: dict[str, int] = field(default_factory=dict)
    restored: list[Recomputed] = field(default_factory=list)
    halves: dict[str, Lowered] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    traced: str = ""
    losses: list[Loss] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)
    called: str = field(default="", compare=False)

    def row(self, node: str) -> Matmul | None:
        """Return the row of the matmul at graph node `node`."""
        return next((m for m in self.matmuls if m.node == node), None)

    def update(self, which: str, /, **changes: Any) -> None:
        """Replace fields of the row at node `which`: a way to edit a plan that is to be handed back."""
        self.matmuls = [replace(m, **changes) if m.node == which else m for m in self.matmuls]

    def undone(self, failure: str) -> Plan:
        """Return this plan as a failed pass leaves it: none of it is carried out, and reasons keep what was decided."""
        why = "a pass failed; FP8 was decided: {}"
        rows = [
            replace(m, decision=BF16, reason=why.format(m.reason), code=Reason.FAILED) if m.decision == FP8 else m
            for m in self.matmuls
        ]
        losses = [
            replace(x, chunk=0, reason=f"a pass failed; chunks of {x.chunk} rows were decided") if x.chunk else x
            for x in self.losses
        ]
        return replace(self, matmuls=rows, losses=losses, masks=[], failure=failure)

    def size(self, size: int | str) -> int:
        """Return a size of a row as a number; 0 for a symbolic one of which nothing is known."""
        if isinstance(size, int) or size in self.hints:
            return size if isinstance(size, int) else self.hints[size]
        known = {name: sympy.Integer(hint) for name, hint in self.hints.items() if name.isidentifier()}
        number = sympy.parse_expr(size, local_dict=known)  # a padded size: "16*((s33 + 15)//16)"
        return int(number) if number.is_Integer else 0

    def line(self, row: Matmul | Saved | Recomputed | Transfer) -> str:
        """Return the user's line of a row, or the line that called the whole graph where the row has none: torch's own
        code calls the modules of an nn.Sequential that is compiled itself."""
        return row.source or (f"called at {self.called}" if row.path and self.called else "")

    @property
    def converted(self) -> list[Matmul]:
        """Rows that run in FP8."""
        return [m for m in self.matmuls if m.decision == FP8]

    @property
    def saved_bytes(self) -> int:
        """Bytes of the GPU's memory that the forward half keeps for the backward half, parameters left out."""
        return sum(row.gpu_bytes for row in self.saved)

    @property
    def kernels(self) -> list[Kernel]:
        """The generated kernels of all halves."""
        return [kernel for half in self.halves.values() for kernel in half.kernels]

    @property
    def updates(self) -> list[MergedUpdate]:
        """The updates of an optimizer, as they were merged."""
        return [update for half in self.halves.values() for update in half.updates]

    @property
    def kept(self) -> list[Matmul]:
        """Rows that were left as they are."""
        return [m for m in self.matmuls if m.decision != FP8]

    def reasons(self) -> Counter[str]:
        """Return how many matmuls were left, by reason."""
        return Counter(m.reason for m in self.kept)

    def __str__(self) -> str:
        return printers.text(self)

    def _repr_html_(self) -> str:
        return printers.html(self)

    def table(self, name: str) -> str:
        """Return one table as text, as `Explanation.table` does."""
        return printers.table(self, name)

    def rows(self, table: str = "matmuls") -> list[dict[str, Any]]:
        """Return flat rows of one table, as `Explanation.rows` does."""
        return printers.rows(self, table)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote, or that of an explanation of one graph. Raises `OptionError`."""
        data = parsed(text)
        if not isinstance(data, dict) or "plans" not in data:
            return Plan.from_data(data, "the plan")
        given = given_plans(text)
        if len(given) != 1:
            raise OptionError(f"this is an explanation of {len(given)} graphs: Explanation.from_json reads them")
        return Plan.from_data(*given[0])

    @staticmethod
    def from_data(data: Any, where: str) -> Plan:
        """Return the plan of its plain data, as `dataclasses.asdict` gives it. where: its name in an `OptionError`."""
        return made(Plan, plan_fields(data, where), where)
