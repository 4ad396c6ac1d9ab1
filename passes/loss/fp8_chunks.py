"""A head in chunks whose matmuls run in FP8: which can, and how their operands reach the operator.

    %ax = fp8.amax(%x, row)   %sx = fp8.scale(%ax, e4m3)   %qx = fp8.quantize(%x, %sx, e4m3, row)   …   the weight, and
    %chosen, %gx, %codes, %xc, %sc = fp8.chunked_loss_in_fp8(%x, %qx, %sx, %qw, %sw, …)     its transpose, likewise
    %gW = fp8.scaled_mm(%codes, %tangent, tensor, %xc, %sc, row)                            in backward

The casts of the input and the weight are markers like others: kernels fuse them with what computes the input, and the
weight is cast once for all chunks. Scales are of rows, whatever the recipe says of other matmuls: a chunk's scale of a
whole tensor would be another in each chunk. What is cast within the operator is in `kernels/loss/fp8_head.py`.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import ALIGNMENT, E4M3, E5M2, LINE, ROW, TENSOR
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.loss.dropped_rows import constant
from fp8compile.passes.matmul.grouped_matmuls import casts_of
from fp8compile.passes.matmul.operand_casts import cast_operand
from fp8compile.plan.reasons import Reason, Why
from fp8compile.plan.rows import FP8, Operand

CODES, SLOPES = Operand(E4M3.name, str(ROW)), Operand(E5M2.name, str(ROW))


def why_not_in_fp8(head: MatmulNode) -> str:
    """Return why the chunks of `head` run in the model's own precision; "" if they run in FP8."""
    if not head.is_fp8:
        return "its output matmul does"
    if any(grad.role == "grad_input" and not grad.is_fp8 for grad in head.grads):
        return "its grad_input does"
    if not isinstance(head.n, int) or not isinstance(head.k, int):
        return "its weight has symbolic sizes"
    return f"its {head.k} features are no multiple of {ALIGNMENT}" if head.k % ALIGNMENT else ""


def operands(c: Compilation, head: MatmulNode, is_turned: bool, like: fx.Node) -> list[fx.Node | None]:
    """Return x, and its data and scale; those of the weight, and of its transpose where `is_turned`."""
    left, right = head.pair
    found: list[fx.Node | None] = [left]
    found += cast_operand(c, left, True, CODES, "", 1, 1, like)
    found += cast_operand(c, right, False, CODES, "", LINE, 1, like)
    turned = (None, None)
    if is_turned:
        turned = cast_operand(c, c.transposed(right, like), False, CODES, "", 1, LINE, like)
    return [*found, *turned]


def grad_weight(
    c: Compilation,
    head: MatmulNode,
    waiting: tuple[fx.Node, fx.Node, fx.Node],
    number: fx.Node | None,
    dtype: torch.dtype,
    like: fx.Node,
) -> fx.Node:
    """Return the gradient of the weight, [N, K], of what waits for it (`fp8_head.empty_waiting`), times `number`."""
    codes, data, scale = waiting
    if number is None:
        number = constant(c, [], 1.0, torch.float32, like)
    if value(codes).shape[0] != head.n:
        codes = c.emit(aten.slice.Tensor, codes, 0, 0, head.n, like=like)
    return c.emit(ops.scaled_mm, codes, number, str(TENSOR), data, scale, str(ROW), None, dtype, like=like)


def accumulates_fast(c: Compilation, head: MatmulNode) -> bool:
    """Return True if the recipe, or a plan, lets the logits be summed in less than FP32."""
    role = head.override.role if head.override is not None else None
    role = role or casts_of(head, c.options.recipe)
    return role is not None and bool(role.fast_accumulation)


def place(head: MatmulNode, why: str) -> None:
    """Note that the matmuls of `head` run in FP8 within the operator: all but a grad_weight that is to be exact."""
    head.left_cast, head.right_cast = CODES, CODES
    for matmul in (head, *head.grads):
        matmul.why = Why(Reason.CHUNKED_LOSS, why)
        if matmul.is_fp8:
            matmul.decide(FP8, matmul.why)
            matmul.is_placed = True
    for grad in (grad for grad in head.grads if grad.is_fp8):
        grad.left_cast, grad.right_cast = (CODES, SLOPES) if grad.weight_on_left else (SLOPES, CODES)
