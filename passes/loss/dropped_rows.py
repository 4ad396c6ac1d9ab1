"""Logits of which some rows are dropped before the loss: the last position of every sequence, for next-token labels.

    %z = view(mm(%x, %Wᵀ), [B, S, N]);  %cut = slice(%z, 1, 0, -1)          rows B·S, of which B·(S−1) have labels
    backward: slice_scatter(zeros, %g, 1, 0, -1)                            zeros where there is no label

A loss in chunks takes all rows; those without a label get the label `DROPPED`, and their losses are dropped. Sizes may
be symbols, where the view names them and a known number of rows goes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Slice
from fp8compile.passes.core.compilation import Compilation, aten, reshape, value
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.core.sizes import same_sizes
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
            of_rows = cut.dim < value(cut.x).dim() - 1
            return node if of_rows and _sizes_before(node) and _count_dropped(node) is not None else None
        if node.target not in SAME_ELEMENTS or node.target is aten.expand.default:
            return None


def _sizes_before(cut: fx.Node) -> list[int | fx.Node]:
    """Return the sizes of what is cut but for its classes, as numbers or as the nodes that its view was given; [] where
    they are not to be had."""
    x = first_input(cut)
    *sizes, _ = value(x).shape
    if all(isinstance(n, int) for n in sizes):
        return [*sizes]
    given = argument(x, "size") if x.target in (aten.view.default, aten._unsafe_view.default) else []
    return [] if -1 in given else [*given[:-1]]


def _count_dropped(cut: fx.Node) -> int | None:
    """Return how many rows of a sequence go; None if that depends on its length."""
    dim = Slice(cut).dim
    dropped = value(first_input(cut)).shape[dim] - value(cut).shape[dim]
    return dropped if isinstance(dropped, int) else dropped.node.maybe_as_int()


def _sizes_after(c: Compilation, cut: fx.Node, like: fx.Node) -> list[int | fx.Node]:
    """Return the sizes of what a cut leaves but for its classes, as numbers or nodes in front of `like`."""
    sizes, dim = _sizes_before(cut), Slice(cut).dim
    size, dropped = sizes[dim], _count_dropped(cut)
    assert dropped is not None  # find_cut has asked
    sizes[dim] = size - dropped if isinstance(size, int) else c.emit(operator.sub, size, dropped, like=like)
    return sizes


def undoes(node: fx.Node, cut: fx.Node) -> bool:
    """Return True if `node` puts a gradient of `cut`'s result back among rows of zeros."""
    if node.target is not aten.slice_scatter.default or not fusible.is_zero(first_input(node)):
        return False
    x = value(first_input(cut))
    same_rows = _along(node.args[2:], x.dim()) == _along(cut.args[1:], x.dim())
    return same_sizes(value(node).shape, x.shape) and same_rows and not node.kwargs and not cut.kwargs


def _along(args: tuple[Any, ...], dims: int) -> list[Any]:
    """Return the arguments of a slice, its dimension counted from the first."""
    dim, *rest = args or (0,)
    return [dim % dims, *rest]


def constant(c: Compilation, shape: Sequence[int | fx.Node], x: float, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """Return a tensor full of `x` on `like`'s device, in front of `like`; sizes are numbers or nodes."""
    device = value(like).device
    with c.graph.inserting_before(like):
        node = c.graph.call_function(aten.full.default, ([*shape], x), {"dtype": dtype, "device": device})
    known = [n.meta["val"] if isinstance(n, fx.Node) else n for n in shape]
    node.meta["val"] = value(like).new_full(known, x, dtype=dtype)
    return node


def with_dropped(c: Compilation, node: fx.Node, cut: fx.Node, like: fx.Node, dropped: int) -> fx.Node:
    """Return one number for each row that is kept → one for every row [rows], `dropped` for those that are dropped."""
    given = c.emit(aten.view.default, node, _sizes_after(c, cut, like), like=like)
    filled = constant(c, _sizes_before(cut), dropped, value(node).dtype, like)
    along = _along(cut.args[1:], value(first_input(cut)).dim())
    spread = c.emit(aten.slice_scatter.default, filled, given, *along, like=like)
    return c.emit(aten.view.default, spread, [-1], like=like)


def without_dropped(c: Compilation, node: fx.Node, cut: fx.Node, like: fx.Node) -> fx.Node:
    """Return one number for every row → one for each that is kept [rows]."""
    whole = c.emit(aten.view.default, node, _sizes_before(cut), like=like)
    kept = c.emit(aten.slice.Tensor, whole, *_along(cut.args[1:], value(first_input(cut)).dim()), like=like)
    return reshape(c, kept, [-1], like)
