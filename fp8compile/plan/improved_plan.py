"""Plans made of measurements: a cast that loses too much is exchanged, or its matmul stays BF16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fp8compile.formats import parse_granularity
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand

RUNNABLE = ("e4m3 tensor", "e4m3 row")  # what any operand of a matmul may be, cheapest first
MEASURED: dict[str, Any] = {"code": Reason.MEASURED, "remarks": (), "left": None, "right": None}  # of a row in BF16


def improve(plan: Plan, known: dict[tuple[str, str, int, str], Row], minimum: float) -> Plan:
    """Return the plan with other casts, or none, where a measured operand keeps less than `minimum` dB."""
    seen: dict[tuple[str, str], int] = {}
    rows = []
    for row in plan.matmuls:
        occurrence = seen[row.path, row.role] = seen.get((row.path, row.role), -1) + 1
        sides = [known.get((row.path, row.role, occurrence, side)) for side in ("left", "right")]
        rows.append(improved_matmul(row, sides, minimum) if row.decision == FP8 else row)
    return replace(plan, matmuls=rows)


def improved_matmul(row: Matmul, sides: Sequence[Row | None], minimum: float) -> Matmul:
    """Return the row of a matmul whose operands were measured as `sides` (None: not measured)."""
    operands = []
    for operand, measured in zip((row.left, row.right), sides, strict=True):
        if measured is None or measured.sqnr is None or measured.sqnr >= minimum:
            operands.append(operand)
            continue
        casts = () if row.kind == "grouped" else RUNNABLE  # which has the casts that it can have
        better = [c for c in casts if (measured.what_if.get(c) or -200.0) >= minimum]
        if not better:
            worst = f"{measured.side} operand at {measured.sqnr:.1f} dB"
            return replace(row, decision=BF16, reason=f"measured: {worst}", **MEASURED)
        format, granularity = better[0].split(" ")
        operands.append(Operand(format, granularity))
    kinds = {parse_granularity(o.granularity).kind for o in operands if o is not None}
    if kinds <= {"tensor", "row"} or operands == [row.left, row.right]:
        return replace(row, left=operands[0], right=operands[1])
    return replace(row, decision=BF16, reason="measured: no cast of one operand fits the other", **MEASURED)
