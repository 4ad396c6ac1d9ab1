"""Memory that a caller has, too: of an input or an output of the graph, or of what the graph writes into.

What backward keeps must not lie there: the caller may write before backward runs, as into a cache, and no version tells
of it, as memory has a counter for each tensor that a graph makes of it. A copy in the graph is no help. Inductor drops
copies that change nothing (`clone`, a concatenation of one tensor, `x + zeros`, `x ** 1`), and lets operators write in
place (`index_put` of a cache that is an input).

So a value is followed to whatever computes it, and from there to all that may be the same memory, through everything
that moves elements and everything that computes of one tensor alone. That finds more than there is, and never less:
what two tensors have been made of has memory of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import is_tensor, shows_memory, value
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.walk import walk


def is_of_caller(node: fx.Node) -> bool:
    """Return True if a caller may have the memory of a value, or of what it is a copy of."""
    sources = set(walk([node], _sources))
    if not all(map(_makes_memory, sources)):
        return True
    alike = walk(sources, _copies)
    return any(user.op == "output" or _writes(user) for n in alike for user in n.users)


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what `node` may be a copy of, once all is dropped that changes nothing."""
    if node.op != "call_function":
        return
    if node.target is operator.getitem or shows_memory(node):
        yield first_input(node)
        return
    read = _read(node)
    if len(read) == 1 or operators.name_of(node.target) in operators.MOVES:
        yield from read


def _copies(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what may be a copy of `node`."""
    yield from (user for user in node.users if node in _sources(user))


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that `node` reads of its own kind (floating-point, or not), but for constants and single
    numbers."""
    is_float = not is_tensor(node) or value(node).is_floating_point()
    tensors = [n for n in node.all_input_nodes if is_tensor(n) and value(n).is_floating_point() == is_float]
    return [n for n in tensors if n.target not in fusible.CONSTANTS and value(n).dim()]


def _makes_memory(node: fx.Node) -> bool:
    """Return True if `node` is no input, and an operator of which it is known that it writes into none of its own."""
    known = node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
    return node.op == "call_function" and known and not _writes(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
