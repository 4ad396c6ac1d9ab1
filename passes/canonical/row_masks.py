"""Row masks: mask the pieces of what is concatenated or split, in place of the whole.

Before      %x = cat([%a, %b], 1)    %y = where(%rows [T, 1], 0, %x)
After       %y = cat([where(%rows, 0, %a), where(%rows, 0, %b)], 1)

Before      %y = where(%rows [T, 1], 0, %x)    %a, %b = split(%y, 64, 1)
After       %a = where(%rows, 0, %xa)          %b = where(%rows, 0, %xb)        %xa, %xb = split(%x, 64, 1)

Transformers masks tokens of other ranks' experts around each grouped matmul. To be split, a masked whole has to lie in
memory, and a concatenation to be masked: a gated activation between two such matmuls would be three kernels. Masked
pieces are computed where they are cast.

Sound because the mask is the same for all elements along that dimension.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial

from torch import fx

from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, getitems, is_tensor, remove_dead, value
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.walk import users_of, walk

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
PARTS = SPLITS | {aten.slice.Tensor}


def mask_pieces(c: Compilation) -> None:
    """Move masks that do not vary along a concatenation in front of it, and those along a split behind it."""
    for node in list(c.graph.nodes):
        if node.target is aten.where.self and not node.kwargs:
            for position in filter(partial(_is_whole, node), (1, 2)):
                if _mask_before_cat(c, node, position) or _split_first(c, node, position):
                    break
    remove_dead(c.graph)


def _is_whole(node: fx.Node, position: int) -> bool:
    """Return True if the argument of a `where` at this position has the shape and dtype of the result."""
    whole = node.args[position]
    return (
        isinstance(whole, fx.Node)
        and is_tensor(whole)
        and value(whole).dtype == value(node).dtype
        and same_sizes(value(whole).shape, value(node).shape)
    )


def _varies(node: fx.Node, position: int, dim: int) -> bool:
    """Return True if mask or other branch of a `where` vary along this dimension of its result."""
    behind = value(node).dim() - dim
    others = [x for i, x in enumerate(node.args) if i != position and isinstance(x, fx.Node) and is_tensor(x)]
    return any(value(x).dim() >= behind and not same_sizes([value(x).shape[-behind]], [1]) for x in others)


def _masked(c: Compilation, node: fx.Node, position: int, piece: fx.Node, like: fx.Node) -> fx.Node:
    """Return a new `where` like `node`, with a piece for the argument at this position."""
    args = [*node.args]
    args[position] = piece
    return c.emit(aten.where.self, *args, like=like)


def _mask_before_cat(c: Compilation, node: fx.Node, position: int) -> bool:
    """Replace where(rows, 0, cat) by a concatenation of masked pieces; return whether that could be done."""
    cat = Concatenation.of(node.args[position])
    if cat is None or set(cat.node.users) != {node} or _varies(node, position, cat.dim):
        return False
    if any(value(piece).dtype != value(node).dtype for piece in cat.pieces):
        return False
    pieces = [_masked(c, node, position, piece, node) for piece in cat.pieces]
    replace_value(c, node, c.emit(aten.cat.default, pieces, cat.dim, like=node))
    return True


def _split_first(c: Compilation, node: fx.Node, position: int) -> bool:
    """Replace parts of where(rows, 0, x) by masked parts of x; return whether that could be done."""
    readers = list(node.users)
    if not all(r.target in PARTS and not r.kwargs and not _varies(node, position, _dim(r)) for r in readers):
        return False
    if _is_returned(node):
        return False
    whole = node.args[position]
    for reader in readers:
        own = c.emit(reader.target, whole, *reader.args[1:], like=reader)  # type: ignore[arg-type]
        for index, part in _parts(reader):
            source = own if index is None else c.emit(operator.getitem, own, index, like=part)
            replace_value(c, part, _masked(c, node, position, source, part))
    return True


def _is_returned(node: fx.Node) -> bool:
    """Return True if the graph returns a part of `node`: such parts share memory, and have its strides."""
    views = walk([node], users_of, through=lambda n: n is node or n.target in VIEWS | {*SPLITS, operator.getitem})
    return any(n.op == "output" for n in views)


def _dim(reader: fx.Node) -> int:
    """Return the dimension that a slice or a split goes along, counted from the first."""
    return argument(reader, "dim") % value(first_input(reader)).dim()


def _parts(reader: fx.Node) -> Iterator[tuple[int | None, fx.Node]]:
    """Yield what a reader takes out of a tensor, each with its position in the tuple, if it gives one."""
    if reader.target in SPLITS:
        yield from getitems(reader).items()
    else:
        yield None, reader
