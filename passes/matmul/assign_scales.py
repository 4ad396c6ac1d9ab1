"""Assign scales: granularity, format and scaling of each operand of each FP8 matmul, as the recipe says.

Decides only: it completes the plan's rows. `left` and `right` of a `Role` speak of activation × weight and of
gradient × other; where the graph has the weight (or the gradient's partner) on the left, the two change places.
Where a given plan names casts, those are taken. Delayed scaling needs a training graph, because an inference pass must
not enter the history: there it is current. A weight that arrives in FP8 (`passes/matmul/gathered_weights.py`) has its
casts already, whatever the recipe says, unless no matmul takes them beside the other operand: then it is cast again,
and the row says why.
"""

from __future__ import annotations

from dataclasses import replace

from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.matmul.gathered_weights import gathered, why_not_taken
from fp8compile.passes.matmul.grouped_matmuls import role_of
from fp8compile.passes.matmul.roles import Site
from fp8compile.plan.rows import CAST_AGAIN, FP8, Matmul, Operand
from fp8compile.recipe import Cast

TAKEN = ("mm", "addmm")


def run(c: Compilation) -> None:
    """Fill in `left`, `right` and `fast_accumulation` of the rows that become FP8."""
    c.plan.matmuls = [_with_casts(row, c) if row.decision == FP8 else row for row in c.plan.matmuls]


def _with_casts(row: Matmul, c: Compilation) -> Matmul:
    edit = c.edits.get(row.node)
    role = (edit.role if edit is not None else None) or role_of(c.sites[row.node], c.options.recipe)
    if role is None:
        return row
    left, right = _operand(role.left, c.is_training), _operand(role.right, c.is_training)
    if c.sites[row.node].weight_on_left and (edit is None or edit.role is None):
        left, right = right, left  # a plan names the operands as they stand
    row = replace(row, left=left, right=right, fast_accumulation=role.fast_accumulation)
    return _with_gathered_weight(row, c.sites[row.node])


def _with_gathered_weight(row: Matmul, site: Site) -> Matmul:
    """The row with the casts that its weight arrived with, if it arrived in FP8."""
    side = "left" if site.weight_on_left else "right"
    weight = gathered(getattr(site, side)) if row.role in ("output", "grad_input") else None
    if weight is None:
        return row
    partner = row.right if site.weight_on_left else row.left
    assert partner is not None
    why = why_not_taken(weight, partner.granularity, partner.format) or ("" if row.kind in TAKEN else "a convolution")
    if why:
        return replace(row, reason=f"{row.reason}; {CAST_AGAIN}: {why}")
    operand = Operand(weight.format, weight.granularity, gathered=True)
    return replace(row, **{side: operand})


def _operand(cast: Cast, is_training: bool) -> Operand:
    delayed = cast.delayed if is_training else None
    return Operand(
        format=cast.format.name,
        granularity=str(cast.granularity),
        power_of_two=cast.power_of_two,
        history=delayed.history if delayed else 0,
        margin=delayed.margin if delayed else 0,
    )
