"""Cast before gathers: rows that a matmul reads in another order, or several times, are cast where they lie.

Before      %g = index(%x [T, C], [%i [n]])     %m = where(%rows [n, 1], 0, %g)
            %a = fp8.amax(%m, row)   %s = fp8.scale(%a, e4m3)   %q = fp8.quantize(%m, %s, e4m3, row)
After       %ax = fp8.amax(%x, row)  %sx = fp8.scale(%ax, e4m3) %qx = fp8.quantize(%x, %sx, e4m3, row)
            %a = where(%rows, 0, index(%ax, [%i]))
            %s = fp8.scale(%a, e4m3)                            %q = where(%rows, 0, index(%qx, [%i]))   (as bytes)

So tokens are sorted by expert: a token is cast once and not for each of its experts, by the kernel that computes it,
and one byte of an element is gathered in place of two. There may be no mask, and conversions on the way.

The values are the same, bit for bit: a row has its own scale, wherever it stands.

Casts of groups of tokens, for grad_weight, have columns of tokens in their scales. They stay, and gather themselves:

Before      %d = fp8.grouped_cast(%m, %offs, …)          After   %d = fp8.grouped_cast(%x, %offs, …, index=%j)
                                                                 %j = where(%rows [n], -1, %i)

Both only where at least as many rows are gathered as there are, as far as sizes are known: of few rows of many, few are
converted and cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import parse_granularity
from fp8compile.passes.core import fusible
from fp8compile.passes.core.collectives import AS_BYTES
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.passes.core.marker_views import Amax, GroupedCast, Quantize, Scale
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import hint, same_sizes
from fp8compile.passes.matmul import share_casts

CONVERSION = torch.ops.prims.convert_element_type.default
BY_ROWS = ("row", "group")  # kinds of granularity


def run(c: Compilation) -> None:
    """Move casts by rows in front of gathers, with the amaxes that they are made of; let casts of groups gather."""
    moved = False
    for node in list(c.graph.nodes):
        amax = Amax.of(node)
        gather = _Gather.of(amax.x) if amax is not None and _is_by_rows(amax) else None
        if amax is None or gather is None or not gather.shows_each_row:
            continue
        if casts := list(_casts(amax)):
            gather.cast_first(c, amax, casts)
            moved = True
    if moved:
        share_casts.unify(c)
    for node in list(c.graph.nodes):
        cast = GroupedCast.of(node)
        gather = _Gather.of(cast.x) if cast is not None and cast.index is None else None
        if cast is not None and gather is not None and gather.shows_each_row:
            gather.cast_groups(c, cast)


def _is_by_rows(marker: Amax | Quantize) -> bool:
    """Return True if no scale of a cast, nor its padding, has to do with more than one row."""
    kind = parse_granularity(marker.granularity).kind
    return kind in BY_ROWS and not marker.transpose and marker.multiples[0] == 1


def _casts(amax: Amax) -> Iterator[Quantize]:
    """Yield the casts of what an amax is of, whose scales are made of it."""
    for scale in [s for user in amax.node.users if (s := Scale.of(user)) is not None and not s.is_delayed]:
        for user in scale.node.users:
            cast = Quantize.of(user)
            if cast is not None and cast.x is amax.x and cast.scale is scale.node and _is_by_rows(cast):
                yield cast


@dataclass
class _Gather:
    """Rows of `source`, converted to `dtype`, in the order that the gather `index` has. masks: `where`s whose other
    branch is zero, first to last."""

    source: fx.Node
    index: fx.Node
    dtype: torch.dtype
    masks: list[fx.Node]

    @classmethod
    def of(cls, node: fx.Node) -> _Gather | None:
        """Return how `node` is gathered; None if it is not."""
        masks, dtype = [], value(node).dtype
        while node.target is not aten.index.Tensor:
            if node.target is CONVERSION and value(node).dtype == dtype:  # one: two may round twice
                node = first_input(node)
            elif (masked := _masked(node)) is not None:
                masks.insert(0, node)
                node = masked
            else:
                return None
        source, (index, *more) = first_input(node), argument(node, "indices")
        if more or index is None or value(source).dim() != 2 or value(index).dim() != 1:
            return None
        return None if value(index).dtype == torch.bool else cls(source, node, dtype, masks)

    @property
    def order(self) -> fx.Node:
        """The numbers of the rows."""
        return argument(self.index, "indices")[0]

    @property
    def shows_each_row(self) -> bool:
        """True if there are at least as many rows as the source has, as far as anybody knows."""
        rows, of = value(self.index).shape[0], value(self.source).shape[0]
        return all(isinstance(n, int) or n.node.has_hint() for n in (rows, of)) and hint(rows) >= hint(of)

    def _converted(self, c: Compilation) -> fx.Node:
        """Return the source in the dtype of what is gathered."""
        if value(self.source).dtype == self.dtype:
            return self.source
        return c.emit(CONVERSION, self.source, self.dtype, like=self.index)

    def cast_first(self, c: Compilation, amax: Amax, casts: list[Quantize]) -> None:
        """Cast the source, and gather what the casts and the amax were."""
        like, rest = self.index, amax.node.args[1:]
        source = self._converted(c)
        own = c.emit(ops.amax, source, *rest, like=like)
        for cast in casts:
            scale = c.emit(ops.scale, own, *cast.scale.args[1:], like=like)
            data = c.emit(ops.quantize, source, scale, *cast.node.args[2:], like=like)
            moved = self._of(c, c.emit(AS_BYTES, data, torch.uint8, like=like), amax.node)
            replace_value(c, cast.node, c.emit(AS_BYTES, moved, value(data).dtype, like=amax.node))
        replace_value(c, amax.node, self._of(c, own, amax.node))

    def _of(self, c: Compilation, source: fx.Node, like: fx.Node) -> fx.Node:
        """Return the rows of another tensor, gathered and masked alike."""
        node = c.emit(aten.index.Tensor, source, [self.order], like=like)
        for mask in self.masks:
            node = _with_mask(c, mask, mask.args[0], 0, node, like)
        return node

    def cast_groups(self, c: Compilation, cast: GroupedCast) -> None:
        """Let a cast of groups read the rows of the source: none, where the masks have zeros."""
        like, source = cast.node, self._converted(c)
        rows = value(source).shape[0]
        size = rows if isinstance(rows, int) else c.emit(aten.sym_size.int, source, 0, like=like)
        from_the_end = c.emit(aten.lt.Scalar, self.order, 0, like=like)  # `remainder` is wrong on CPUs with torch 2.11
        index = c.emit(aten.add.Tensor, self.order, size, like=like)
        index = c.emit(aten.where.self, from_the_end, index, self.order, like=like)
        for mask in self.masks:
            flat = c.emit(aten.squeeze.dim, mask.args[0], -1, like=like)
            index = _with_mask(c, mask, flat, -1, index, like)
        x, *options = cast.node.args  # all of them: `operand_casts` names each
        assert x is cast.x
        assert len(options) == len(ops.grouped_cast._schema.arguments) - 2
        cast.node.args = (source, *options, index)


def _with_mask(c: Compilation, mask: fx.Node, rows: Any, number: int, node: fx.Node, like: fx.Node) -> fx.Node:
    """Return `node` with a number where a `where` has zeros; rows: its condition, in the shape that `node` takes."""
    x = value(node)
    other = c.emit(aten.full.default, [], number, dtype=x.dtype, device=x.device, like=like)
    branches = (other, node) if fusible.is_zero(mask.args[1]) else (node, other)
    return c.emit(aten.where.self, rows, *branches, like=like)


def _masked(node: fx.Node) -> fx.Node | None:
    """Return what a `where` shows in some rows, if it has zeros in all others."""
    if node.target is not aten.where.self or node.kwargs:
        return None
    mask, *branches = node.args
    if not isinstance(mask, fx.Node) or not same_sizes(value(mask).shape, [*value(node).shape[:1], 1]):
        return None
    left = [x for x in branches if not fusible.is_zero(x)]
    if len(left) != 1 or not isinstance(left[0], fx.Node):
        return None
    shown, own = value(left[0]), value(node)
    return left[0] if shown.dtype == own.dtype and same_sizes(shown.shape, own.shape) else None
