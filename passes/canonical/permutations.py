"""Permutations: gather what is scattered by the indices of a sort, by their inverse.

    %order    sort(%experts)[1] [n]: which of the n = T · k pairs of a token and its expert comes first, second, …
    %inverse  index_put(empty [n], [%order], iota(n)): in which place each pair is

Before      %g  = index_put(zeros [n, D], [%inverse], %x [n, D], accumulate)
After       %g  = index(%x, [%order])

Before      %dx = index_put(zeros [T, D], [%order // k], %dy [n, D], accumulate)
After       %dx = sum(view(index(%dy, [%inverse]), [T, k, D]), 1)

Differentiation leaves these of tokens that are sorted by expert, and sorted back. Programs that may meet the same row
add to it in memory, in any order, after others filled it with zeros; what is gathered is computed where it is read.
Where %x repeats each of T rows k times, %g is index(%rows, [%order // k]); a conversion to FP32 comes behind, so that
rows of BF16 are moved.

Sound because a permutation meets each row once, and the k rows of a token are those that are added: in another order,
and those of BF16 in FP32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import Compilation, aten, remove_dead, value
from fp8compile.passes.core.node_views import Getitem, argument, first_input, node_argument
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.walk import walk

prims = torch.ops.prims
SORTS = (aten.sort.default, aten.sort.stable)
FLOOR = "floor"
WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Order:
    """A permutation of range(`size`): `inverse` is its inverse, where the graph has that."""

    node: fx.Node
    size: Any
    inverse: fx.Node | None = None


def gather_back(c: Compilation) -> None:
    """Replace what is scattered by a permutation, or by the rows that a sorted pair belongs to."""
    orders = _find_orders(c.graph)
    if not orders:
        return
    for node in list(c.graph.nodes):
        if node.target is aten.index_put.default and node not in orders:
            (index, *more), x = argument(node, "indices"), node_argument(node, "values")
            if not more and index is not None:
                _gather(c, node, x, index, bool(argument(node, "accumulate")), orders)
        elif node.target is aten.scatter_add.default and argument(node, "dim") == 0:
            index = _index_of_rows(node_argument(node, "index"), node_argument(node, "src"))
            if index is not None:
                _gather(c, node, node_argument(node, "src"), index, True, orders)
    remove_dead(c.graph)


def _find_orders(graph: fx.Graph) -> dict[fx.Node, Order]:
    """Return the permutations of a graph, those that invert others included."""
    orders: dict[fx.Node, Order] = {}
    for node in graph.nodes:
        part = Getitem.of(node)
        if part is not None and part.source.target in SORTS and part.index == 1 and value(node).dim() == 1:
            orders[node] = Order(node, value(node).shape[0])
    for node in graph.nodes:
        order = orders.get(_inverted(node))
        if order is not None and order.inverse is None and same_sizes(value(node).shape, [order.size]):
            _pair(orders, order, node)
    return orders


def _pair(orders: dict[fx.Node, Order], order: Order, inverse: fx.Node) -> None:
    """Note that a node is the inverse of a permutation, and that of it."""
    orders[order.node] = Order(order.node, order.size, inverse)
    orders[inverse] = Order(inverse, order.size, order.node)


def _inverted(node: fx.Node) -> Any:
    """Return the node of which `node` would be the inverse, if that is a permutation: what index_put numbers by it, in
    order, or what is sorted."""
    part = Getitem.of(node)
    if part is not None and part.source.target in SORTS and part.index == 1:
        return None if argument(part.source, "descending") else first_input(part.source)
    if node.target is not aten.index_put.default or argument(node, "accumulate"):
        return None
    (index, *more), numbers = argument(node, "indices"), node_argument(node, "values")
    counts_up = numbers.target is prims.iota.default and [numbers.kwargs.get(k) for k in ("start", "step")] == [0, 1]
    return index if not more and counts_up and same_sizes(value(numbers).shape, value(node).shape) else None


def _index_of_rows(index: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return the vector that an index [n, D, …] of scatter_add repeats along its rows; None if it is another, or not of
    all of `source`."""
    column = first_input(index) if index.target is aten.expand.default else None
    if column is None or not same_sizes(value(index).shape, value(source).shape):
        return None
    count, *rest = value(index).shape
    if not same_sizes(value(column).shape, (count, *(1 for _ in rest))):
        return None
    while column.target in fusible.RESHAPES:
        column = first_input(column)
    return column if same_sizes(value(column).shape, value(index).shape[:1]) else None


def _gather(
    c: Compilation, node: fx.Node, x: fx.Node, index: fx.Node, accumulate: bool, orders: dict[fx.Node, Order]
) -> None:
    """Replace `node`, which writes the rows of x to those of its first input, or adds them, by what gathers them."""
    zeros, rest = first_input(node), value(node).shape[1:]
    if value(x).dtype != value(node).dtype or (accumulate and not fusible.is_zero(zeros)):
        return
    order = orders.get(index)
    if order is not None:
        alike = same_sizes(value(x).shape, (order.size, *rest)) and same_sizes(value(node).shape, value(x).shape)
        if alike and (accumulate or order.inverse is not None):
            replace_value(c, node, _rows(c, x, _inverse(c, order, orders, node), node))
        return
    divided = _divided(index, orders) if accumulate else None
    if divided is None or not value(x).is_floating_point():  # sums of integers are of another dtype, of bools no sums
        return
    order, k = divided
    if not same_sizes(value(x).shape, (order.size, *rest)) or not same_sizes([value(node).shape[0] * k], [order.size]):
        return
    if not all(isinstance(size, int) for size in rest):
        return
    back = _rows(c, x, _inverse(c, order, orders, node), node)
    rows = c.emit(aten.view.default, back, [-1, k, *rest], like=node)
    replace_value(c, node, c.emit(aten.sum.dim_IntList, rows, [1], like=node))


def _divided(index: fx.Node, orders: dict[fx.Node, Order]) -> tuple[Order, int] | None:
    """Return (permutation, k) of which `index` is the quotient, rounded down (or to zero, as nothing is negative)."""
    if index.target is not aten.div.Tensor_mode or argument(index, "rounding_mode") is None:
        return None
    order, k = orders.get(first_input(index)), argument(index, "other")
    return (order, k) if order is not None and isinstance(k, int) and k > 0 else None


def _inverse(c: Compilation, order: Order, orders: dict[fx.Node, Order], like: fx.Node) -> fx.Node:
    """Return the inverse of a permutation: the graph's, or a new one if that is made of `like`, which is to read it."""
    if order.inverse is not None:
        made_of = walk([order.inverse], lambda n: n.all_input_nodes, through=lambda n: n not in (like, order.node))
        if like not in made_of:
            return order.inverse
    if isinstance(order.size, int):
        given = {"dtype": torch.int64, "device": value(order.node).device}
        numbers = c.emit(prims.iota.default, order.size, like=like, start=0, step=1, requires_grad=False, **given)
        inverse = c.emit(aten.index_put.default, numbers, [order.node], numbers, like=like)
    else:  # of a size that comes with the call: a second sort
        inverse = c.emit(operator.getitem, c.emit(aten.sort.default, order.node, like=like), 1, like=like)
    if order.inverse is None:
        _pair(orders, order, inverse)
    return inverse


def _rows(c: Compilation, x: fx.Node, order: fx.Node, like: fx.Node) -> fx.Node:
    """Return rows of x, [n, …], in this order: of what x repeats, and before it is made wider."""
    source, count = _repeated(x)
    if count > 1:
        order = _quotient(c, order, count, like)
    narrow = source
    while narrow.target in fusible.RESHAPES and same_sizes(value(narrow).shape, value(first_input(narrow)).shape):
        narrow = first_input(narrow)
    if narrow.target is prims.convert_element_type.default and value(narrow).dtype in WIDE:
        before = first_input(narrow)
        if value(before).dtype.is_floating_point and value(before).dtype.itemsize < value(narrow).dtype.itemsize:
            found = c.emit(aten.index.Tensor, before, [order], like=like)
            return c.emit(prims.convert_element_type.default, found, value(narrow).dtype, like=like)
    return c.emit(aten.index.Tensor, source, [order], like=like)


def _quotient(c: Compilation, order: fx.Node, count: int, like: fx.Node) -> fx.Node:
    """Return order // count: one that the graph has, or a new one."""
    for user in order.users:
        if user.target is aten.div.Tensor_mode and (user.args[1:], user.kwargs) == ((count,), {"rounding_mode": FLOOR}):
            return user
    return c.emit(aten.div.Tensor_mode, order, count, like=like, rounding_mode=FLOOR)


def _repeated(x: fx.Node) -> tuple[fx.Node, int]:
    """Return (rows [T, …], k) where x is each of these rows k times, one after the other; else x and 1."""
    node = x
    while node.target in fusible.RESHAPES:
        node = first_input(node)
    if node.target is not aten.expand.default:
        return x, 1
    single, shape, rest = first_input(node), value(node).shape, value(x).shape[1:]
    fits = len(shape) == 2 + len(rest) and same_sizes(shape[2:], rest) and isinstance(shape[1], int)
    if not fits or not same_sizes(value(single).shape, (shape[0], 1, *rest)):
        return x, 1
    rows = first_input(single) if single.target is aten.unsqueeze.default else single
    fits = same_sizes(value(rows).shape, (shape[0], *rest))
    return (rows, shape[1]) if fits and same_sizes([shape[0] * shape[1]], value(x).shape[:1]) else (x, 1)
