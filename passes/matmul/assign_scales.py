"""Assign scales: granularity, format and scaling of each operand of each FP8 matmul, as the recipe says.

Decides only: it completes the matmuls' records. `left` and `right` of a `Role` speak of activation × weight and of
gradient × other; where the graph has the weight (or the gradient's partner) on the left, the two change places.
Where a given plan names casts, those are taken. Delayed scaling needs a training graph, because an inference pass must
not enter the history: there it is current. A weight that arrives in FP8 (`passes/matmul/gathered_weights.py`) has its
casts already, whatever the recipe says, unless no matmul takes them beside the other operand: then it is cast again,
and the reason says why.
"""

from __future__ import annotations

from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.matmul.gathered_weights import gathered, why_not_taken
from fp8compile.passes.matmul.grouped_matmuls import casts_of
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import Operand
from fp8compile.recipe import Cast

TAKEN = ("mm", "addmm")


def run(c: Compilation) -> None:
    """Fill in the casts of the matmuls that become FP8."""
    for matmul in c.matmuls.converted:
        given = matmul.override.role if matmul.override is not None else None
        role = given or casts_of(matmul, c.options.recipe)
        if role is None:
            continue
        left, right = _operand(role.left, c.is_training), _operand(role.right, c.is_training)
        if matmul.weight_on_left and given is None:
            left, right = right, left  # a plan names the operands as they stand
        matmul.left_cast, matmul.right_cast, matmul.fast_accumulation = left, right, bool(role.fast_accumulation)
        _take_gathered_weight(matmul)


def _take_gathered_weight(matmul: MatmulNode) -> None:
    """Give a matmul the cast that its weight arrived with, if it arrived in FP8."""
    weight = gathered(matmul.weight) if matmul.role in ("output", "grad_input") else None
    if weight is None or matmul.why is None:
        return
    partner = matmul.casts[1] if matmul.weight_on_left else matmul.casts[0]
    why = why_not_taken(weight, partner.granularity, partner.format)
    why = why or ("" if matmul.kind in TAKEN else "a convolution")
    if why:
        text = f"; its weight was gathered in FP8 and is cast again: {why}"
        matmul.why = matmul.why.with_remark(Reason.CAST_AGAIN, text)
        return
    operand = Operand(weight.format, weight.granularity, gathered=True)
    if matmul.weight_on_left:
        matmul.left_cast = operand
    else:
        matmul.right_cast = operand


def _operand(cast: Cast, is_training: bool) -> Operand:
    delayed = cast.delayed if is_training else None
    return Operand(
        format=cast.format.name,
        granularity=str(cast.granularity),
        power_of_two=cast.power_of_two,
        history=delayed.history if delayed else 0,
        margin=delayed.margin if delayed else 0,
    )
