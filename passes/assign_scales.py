"""Assign scales: granularity, format and scaling of each operand of each FP8 matmul, as the recipe says.

Decides only: it completes the plan's rows. `left` and `right` of a `Role` speak of activation × weight and of
gradient × other; where the graph has the weight (or the gradient's partner) on the left, the two change places.
Where a given plan names casts, those are taken. Delayed scaling needs a training graph, because an inference pass must
not enter the history: there it is current.
"""

from __future__ import annotations

from dataclasses import replace

from fp8compile.passes.compilation import Compilation
from fp8compile.plan import FP8, Matmul, Operand
from fp8compile.recipe import Cast


def run(c: Compilation) -> None:
    """Fill in `left`, `right` and `fast_accumulation` of the rows that become FP8."""
    c.plan.matmuls = [_with_casts(row, c) if row.decision == FP8 else row for row in c.plan.matmuls]


def _with_casts(row: Matmul, c: Compilation) -> Matmul:
    edit = c.edits.get(row.node)
    role = (edit.role if edit is not None else None) or c.options.recipe.role(row.role)
    if role is None:
        return row
    left, right = _operand(role.left, c.is_training), _operand(role.right, c.is_training)
    if c.sites[row.node].weight_on_left and (edit is None or edit.role is None):
        left, right = right, left  # a plan names the operands as they stand
    return replace(row, left=left, right=right, fast_accumulation=role.fast_accumulation)


def _operand(cast: Cast, is_training: bool) -> Operand:
    delayed = cast.delayed if is_training else None
    return Operand(
        format=cast.format.name,
        granularity=str(cast.granularity),
        power_of_two=cast.power_of_two,
        history=delayed.history if delayed else 0,
        margin=delayed.margin if delayed else 0,
    )
