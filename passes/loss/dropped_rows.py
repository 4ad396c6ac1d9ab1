"""Logits of which some rows are dropped before the loss: the last position of every sequence, for next-token labels.

    %z = view(mm(%x, %Wᵀ), [B, S, N]);  %cut = slice(%z, 1, 0, -1)          rows B·S, of which B·(S−1) have labels
    backward: slice_scatter(zeros, %g, 1, 0, -1)                            zeros where there is no label

A loss in chunks takes all rows; those without a label get the label `DROPPED`, and their losses are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Slice
from fp8compile.passes.core.compilation import Compilation, aten, reshape, value
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.loss.loss_equivalence import SAME_ELEMENTS


def find_cut(logits: fx.Node, backward: set[fx.Node]) -> fx.Node | None:
    """Return the slice that drops rows of `logits`, if nothing else of forward reads them."""
    node = logits
    while True:
        users = [u for u in node.users if u not in backward]
        if len(users) != 1:
            return None
        (node,) = users
        if cut := Slice.of(node):
            x = value(cut.x)
            static = all(isinstance(n, int) for n in x.shape)
            return node if static and cut.dim < x.dim() - 1 else None
        if node.target not in SAME_ELEMENTS or node.target is aten.expand.default:
            return None


def undoes(node: fx.Node, cut: fx.Node) -> bool:
    """Return True if `node` puts a gradient of `cut`'s result back among rows of zeros."""
    if node.target is not aten.slice_scatter.default or not fusible.is_zero(first_input(node)):
        return False
    x = value(first_input(cut))
    same_rows = _along(node.args[2:], x.dim()) == _along(cut.args[1:], x.dim())
    return value(node).shape == x.shape and same_rows and not node.kwargs and not cut.kwargs


def _along(args: tuple[Any, ...], dims: int) -> list[Any]:
    """Return the arguments of a slice, its dimension counted from the first."""
    dim, *rest = args or (0,)
    return [dim % dims, *rest]


def constant(c: Compilation, shape: list[int], x: float, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Return a tensor full of `x` on `like`'s device."""
    fake = value(like).new_full(shape, x, dtype=dtype)
    with c.graph.inserting_before(like):
        node = c.graph.call_function(aten.full.default, (shape, x), {"dtype": dtype, "device": fake.device})
    node.meta["val"] = fake
    return node


def with_dropped(c: Compilation, node: fx.Node, cut: fx.Node, like: fx.Node, dropped: int) -> fx.Node:
    """Return one number for each row that is kept → one for every row [rows], `dropped` for those that are dropped."""
    given, x = reshape(c, node, list(value(cut).shape[:-1]), like), value(first_input(cut))
    filled = constant(c, list(x.shape[:-1]), dropped, value(node).dtype, like)
    spread = c.emit(aten.slice_scatter.default, filled, given, *_along(cut.args[1:], x.dim()), like=like)
    return c.emit(aten.view.default, spread, [-1], like=like)


def without_dropped(c: Compilation, node: fx.Node, cut: fx.Node, like: fx.Node) -> fx.Node:
    """Return one number for every row → one for each that is kept [rows]."""
    x = value(first_input(cut))
    whole = reshape(c, node, list(x.shape[:-1]), like)
    kept = c.emit(aten.slice.Tensor, whole, *_along(cut.args[1:], x.dim()), like=like)
    return reshape(c, kept, [value(kept).numel()], like)
