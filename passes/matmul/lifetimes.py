"""Lifetimes: which matmuls of one activation have results, and gradients, that are alive at one time anyway.

Merged matmuls write one tensor. It is there as soon as the first of them is wanted, and stays until the last is no
longer; their gradients wait for one another likewise. Where lifetimes overlap that takes no memory: queries, keys and
values wait for attention, a gate for what it multiplies, and what backward reads waits for backward. Where they do not,
it does: a frozen teacher is through before its student reads the same batch, every layer of a decoder has done with
its keys' gradient before the next one has its own.

Times are places in the graph, which has the order of the model's own code. Only the kernels of libraries (matmuls,
attention, convolutions) count: what lies between them is computed where it is read, if it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import base, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.sizes import count
from fp8compile.passes.core.walk import users_of, walk

Order = Mapping[fx.Node, int]
MOST_MORE = 1.125  # times what is alive at one time


def split_by_lifetime(matmuls: Iterable[MatmulNode], order: Order) -> list[list[MatmulNode]]:
    """Return output matmuls in groups that take little more memory merged, for results and for gradients.

    order: the place of each node in the graph.
    """
    groups: list[list[MatmulNode]] = []
    for matmul in sorted(matmuls, key=lambda m: order[m.node]):
        if groups and _are_alive_at_once([*groups[-1], matmul], order):
            groups[-1].append(matmul)
        else:
            groups.append([matmul])
    return groups


def _are_alive_at_once(matmuls: list[MatmulNode], order: Order) -> bool:
    results = [m.node for m in matmuls]
    gradients = [g for m in matmuls if (g := _gradient(m)) is not None]
    return all(_together(nodes) <= MOST_MORE * _at_once(nodes, order) for nodes in (results, gradients))


def _together(nodes: Iterable[fx.Node]) -> int:
    return sum(count(value(node).shape) for node in nodes)


def _at_once(nodes: list[fx.Node], order: Order) -> int:
    """Return how many elements of these are alive at one time, at most."""
    lives = {node: range(_made(node, order), _last_read(node, order) + 1) for node in nodes}
    return max((_together(n for n in nodes if life.start in lives[n]) for life in lives.values()), default=0)


def _gradient(matmul: MatmulNode) -> fx.Node | None:
    """Return the gradient of its result that its gradient matmuls read; None without any."""
    for found in matmul.grads:
        operands = {base(x) for x in found.pair} - {base(x) for x in matmul.pair}
        if len(operands) == 1:
            return operands.pop()
    return None


def _made(node: fx.Node, order: Order) -> int:
    """Return the place of the last kernel of a library among `node` and what it is computed from."""
    found = walk([node], through=_takes_no_time)
    return max((order[n] for n in found if not _takes_no_time(n)), default=order[node])


def _last_read(node: fx.Node, order: Order) -> int:
    """Return the place of the last node that reads `node`, or what is computed from it without a library's kernel."""
    found = walk([node], users_of, through=lambda n: n is node or _takes_no_time(n))
    return max(order[n] for n in found)


def _takes_no_time(node: fx.Node) -> bool:
    """Return True for what is neither given nor computed by a library's kernel."""
    return Getitem.of(node) is not None or not fusible.is_opaque(node)
