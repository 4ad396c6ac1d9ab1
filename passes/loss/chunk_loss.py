"""Chunk loss: an output head and its cross-entropy, in chunks of rows. All logits never exist, nor their FP32 copy.

Before      %logits = mm(%x, %Wᵀ);  … %chosen = gather(log_softmax(%logits), 1, %labels);  %loss = …(%chosen)
            %dlogits = …(%logits, %labels, %tangent);  %dx = mm(%dlogits, %W);  %dW = mm(%dlogitsᵀ, %x)
After       %chosen, %gx, %gW = fp8.chunked_loss(%x, %W, %labels, %weights);  %loss = …(%chosen)
            %dx = %gx · %tangent;  %dW = %gW · %tangent

What a loss makes of log-probabilities (a mean over labels that count, a sum over a number of items, weights of rows)
stays as the user wrote it; only how much each row counts is told the operator (`passes/loss/loss_weights.py`). Sound
because `passes/loss/find_loss.py` proves by execution that what is replaced computes what the operator does, and
because gradients are linear in the incoming number. What cannot be replaced is left, with its reason in the plan.

Where only backward knows how much a row counts (losses of rows are returned, or it depends on the loss itself, as of a
preference or a policy), the operator runs twice: for the terms in forward, with logits again for gradients in backward.
That is a fourth matmul, so "auto" does not.

After       %chosen = fp8.chunked_loss(%x, %W, %labels);  …;  %dx, %dW = fp8.chunked_loss(%x, %W, %labels, %g)

The chunks of a head in FP8 run in FP8 (`passes/loss/fp8_chunks.py`), and backward computes %dW, of what forward keeps.

"auto" leaves logits whole that are small (LEAST_BYTES), or of which a chunk would be more than half: the gradient of
the weight, which waits for backward in FP32 or as codes, takes as much as two chunks of logits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.kernels.loss import fp8_head
from fp8compile.kernels.loss.chunked_loss import rows_of_chunk
from fp8compile.kernels.loss.fp8_head import waits_for_backward
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Gather
from fp8compile.passes.core.compilation import (
    Compilation,
    aten,
    dependents,
    is_tangent,
    reshape,
    sort_topologically,
    value,
)
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.loss.dropped_rows import with_dropped, without_dropped
from fp8compile.passes.loss.find_loss import Found, find_loss
from fp8compile.passes.loss.fp8_chunks import (
    accumulates_fast,
    grad_weight,
    operands,
    place,
    why_not_in_fp8,
)
from fp8compile.passes.loss.label_indexing import gather_labels
from fp8compile.passes.loss.loss_equivalence import SCATTERS
from fp8compile.passes.loss.loss_parts import NotFoundError
from fp8compile.passes.loss.loss_weights import known_in_backward, known_in_forward, weighted_sum
from fp8compile.passes.loss.symbolic_sizes import read_elsewhere
from fp8compile.passes.save.saved_forms import bytes_of, count
from fp8compile.plan.reasons import Reason, Why
from fp8compile.plan.rows import BF16, Loss

LEAST_BYTES = 256 * 2**20
ROLES = ("grad_input", "grad_weight", "grad_bias")
prims = torch.ops.prims


def run(c: Compilation) -> None:
    """Rewrite the heads that qualify; a row of the plan for each that was looked at."""
    if c.options.chunk_loss is False:
        return
    heads = [m for m in c.matmuls if m.role == "output" and m.is_plain and not m.weight_on_left]
    if c.options.chunk_loss == "auto":
        heads = [s for s in heads if _bytes(s) >= LEAST_BYTES]
    for classes in {s.n for s in heads}:
        gather_labels(c, classes)
    heads = [s for s in heads if _has_labels(s)]
    for head in heads:  # one changes what the next is read by
        read_elsewhere(c.graph, head.node)
        _run_on(c, head, dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n))))
        sort_topologically(c.graph)


def _has_labels(head: MatmulNode) -> bool:
    """Return True if something like a cross-entropy may read what `head` computes: labels choose classes, or a softmax
    is taken, not far away."""
    frontier, seen = [head.node], {head.node}
    for _ in range(16):
        frontier = [u for n in frontier for u in n.users if u not in seen and not fusible.is_library_kernel(u)]
        seen.update(frontier)
    near = seen.union(*(n.all_input_nodes for n in seen))
    read = (*SCATTERS, aten.gather.default, aten.amax.default)
    along = [(value(first_input(n)), argument(n, "dim")) for n in near if n.target in read]
    sizes = {x.shape[i] for x, dim in along if x.dim() for i in (dim if isinstance(dim, (list, tuple)) else [dim])}
    return str(head.n) in map(str, sizes)


def _run_on(c: Compilation, head: MatmulNode, backward: set[fx.Node]) -> None:
    wanted, size = c.options.chunk_loss, _bytes(head)
    is_fp8 = not why_not_in_fp8(head)
    usual = fp8_head.rows_by_default(count([head.m])) if is_fp8 else rows_of_chunk(head.k)
    rows = usual if isinstance(wanted, (bool, str)) else wanted
    if is_fp8:
        rows, head.fast_accumulation = fp8_head.rows_of_chunk(rows), accumulates_fast(c, head)
    try:
        if wanted == "auto":
            _refuse(head, usual, is_fp8)
        found = find_loss(head, backward)
        said = _rewrite(c, found, rows, backward, again=wanted != "auto")
    except NotFoundError as why:
        _describe(c, head, size, 0, str(why))
        return
    _describe(c, head, size, rows, said)
    why = f"the output head and its loss run in chunks of {rows} rows"
    if whole := why_not_in_fp8(head):
        why += f"; not in FP8: {whole}" if head.is_fp8 else ""
        for gone in (head, *head.grads):
            gone.decide(BF16, Why(Reason.CHUNKED_LOSS, why))
    else:
        place(head, why)
    for gone in (head, *head.grads):
        gone.milliseconds_bf16 = gone.milliseconds_fp8 = None


def _bytes(head: MatmulNode) -> int:
    """Return what whole logits take."""
    return bytes_of(value(head.node))


def _refuse(head: MatmulNode, rows: int, is_fp8: bool) -> None:
    """Raise what "auto" has against chunks of so many rows."""
    if head.is_fp8 and not is_fp8:
        why = why_not_in_fp8(head)
        raise NotFoundError(f"its matmul runs in FP8, and chunks of it would not: {why}; chunk_loss=True computes them")
    small = "smaller ones would not fill matmul units"
    least, why = (4, small) if is_fp8 else (2, "the weight's gradient would take as much")
    if count([head.m]) < least * rows:
        raise NotFoundError(f"fewer than {least} chunks of {rows} rows: {why}")


def _describe(c: Compilation, head: MatmulNode, size: int, chunk: int, reason: str) -> None:
    m, n = (x if isinstance(x, int) else str(x) for x in (head.m, head.n))
    dtype = str(value(head.node).dtype).removeprefix("torch.")
    c.plan.losses.append(Loss(head.name, head.path, head.source, m, n, dtype, size, chunk, reason))


def _rewrite(c: Compilation, found: Found, rows: int, backward: set[fx.Node], again: bool) -> str:
    """Put the operator in place of the head; dead code takes the rest. again: logits may be computed again in backward.

    Returns what is said of it.
    """
    like, wanted = found.labelled, [role in found.gradients for role in ROLES]
    weights, unknown = None, None
    try:
        weights = known_in_forward(c, found, backward) if found.cotangents else None
    except NotFoundError as why:
        if not again:
            raise NotFoundError(f"{why}; chunk_loss=True computes logits in chunks, and again in backward") from why
        unknown = why
    index = _index(c, found)
    if unknown is None:
        results = _call(c, found, rows, index, weights and weights.values, wanted, like)
        terms, said = results[0], "every chunk's gradients are computed beside its losses"
    else:
        terms = _call(c, found, rows, index, None, [False] * len(ROLES), like)[0]
        place = min(found.gradients.values(), key=list(c.graph.nodes).index)
        weights = known_in_backward(c, found, place)
        results = _call(c, found, rows, index, weights.values, wanted, place)
        said = f"logits are computed again in backward: {unknown}"
    _replace_ends(c, found, terms)
    number = None if weights is None else weights.number
    roles = [role for role in ROLES if role in found.gradients]
    if "grad_weight" in roles and _waits(found.head):
        roles.remove("grad_weight")
        *results, codes, columns, of_columns = results
        old = found.gradients["grad_weight"]
        waiting = codes, columns, of_columns
        _put(c, found, old, grad_weight(c, found.head, waiting, number, value(old).dtype, old))
    for role, gradient in zip(roles, results[1:], strict=True):
        _replace_gradient(c, found, role, gradient, number)
    return said


def _waits(head: MatmulNode) -> bool:
    """Return True if backward computes the weight's gradient, of what the operator leaves for it."""
    of_weight = any(grad.role == "grad_weight" and grad.is_fp8 for grad in head.grads)
    return of_weight and not why_not_in_fp8(head) and waits_for_backward(count([head.m]), head.k)


def _index(c: Compilation, found: Found) -> fx.Node:
    """Return the labels of all rows."""
    index = reshape(c, Gather(found.labelled).index, [-1], found.labelled)
    return index if found.cut is None else with_dropped(c, index, found.cut, found.labelled, DROPPED)


def _call(
    c: Compilation,
    found: Found,
    rows: int,
    index: fx.Node,
    weights: fx.Node | None,
    wanted: list[bool],
    like: fx.Node,
) -> list[fx.Node]:
    """Return a call of the operator: its terms, and the gradients that are wanted."""
    head, curve = found.head, found.curve
    left, right = head.pair
    how = rows, curve.inner, curve.outer, wanted, found.every_term
    if why_not_in_fp8(head):
        given = (left, c.transposed(right, like), head.bias, index, weights)
        loss = c.emit(ops.chunked_loss, *given, *how, like=like)
    else:
        given = (*operands(c, head, wanted[0], like), head.bias, index, weights, head.n)
        exact = any(grad.role == "grad_weight" and not grad.is_fp8 for grad in head.grads)
        waits = wanted[1] and _waits(head)
        loss = c.emit(ops.chunked_loss_in_fp8, *given, *how, exact, waits, head.fast_accumulation, like=like)
    results = _results(c, loss)
    for node in (loss, *results):  # a checkpoint around a loss would compute it twice, to free what never exists
        node.meta.pop("recompute", None)
    return results


def _replace_ends(c: Compilation, found: Found, terms: fx.Node) -> None:
    """Make what is read from outside of the operator's terms: log-probabilities [rows], or [len(TERMS), rows]."""
    for end, factors in found.ends.items():
        new = weighted_sum(c, factors, [terms] if not found.every_term else _rows(c, terms, end), end)
        if found.cut is not None:
            new = without_dropped(c, new, found.cut, end)
        new = reshape(c, new, list(value(end).shape), end)
        replace_value(c, end, _narrowed(c, new, end))


def _rows(c: Compilation, terms: fx.Node, like: fx.Node) -> list[fx.Node]:
    return [c.emit(aten.select.int, terms, 0, i, like=like) for i in range(len(TERMS))]


def _results(c: Compilation, loss: fx.Node) -> list[fx.Node]:
    return [c.emit(operator.getitem, loss, i, like=loss, before=loss.next) for i in range(len(loss.meta["val"]))]


def _narrowed(c: Compilation, node: fx.Node, like: fx.Node) -> fx.Node:
    """Return `node`, which is FP32, in the dtype of `like`."""
    dtype = value(like).dtype
    return node if dtype is torch.float32 else c.emit(prims.convert_element_type.default, node, dtype, like=like)


def _replace_gradient(c: Compilation, found: Found, role: str, gradient: fx.Node, number: fx.Node | None) -> None:
    old = found.gradients[role]
    new = gradient if number is None else c.emit(aten.mul.Tensor, gradient, number, like=old)
    _put(c, found, old, _narrowed(c, new, old))


def _put(c: Compilation, found: Found, old: fx.Node, new: fx.Node) -> None:
    """Put `new`, [M, K], [N, K] or [N], in place of a gradient."""
    matmul: Any = next((s for s in found.head.grads if s.node is old), None)
    if matmul is None:
        new = c.emit(aten.unsqueeze.default, new, 0, like=old)
        if value(old).dim() == 1:
            new = c.emit(aten.view.default, new, [-1], like=old)
    elif matmul.weight_on_left:  # its gradient is the right factor: the product is the transpose of ours
        new = c.emit(aten.permute.default, new, [1, 0], like=old)
    replace_value(c, old, new)
