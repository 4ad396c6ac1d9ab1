"""Scattered slices: replace a sum of slices, each put among zeros of its own, by their concatenation.

Before      %s2 = select_scatter(zeros [3, M, K], %dv, 0, 2)   %s1 = select_scatter(zeros, %dk, 0, 1)   …
            %dqkv = add(add(%s2, %s1), %s0)

After       %dqkv = cat([unsqueeze(%dq, 0), unsqueeze(%dk, 0), unsqueeze(%dv, 0)], 0)

Before      slice_scatter(zeros [B, S], %dx [B, S], 0, 0, 2⁶³−1)                     After    %dx

Differentiation leaves such a sum where a tensor was read by indices or slices that cover it: `proj[0]`, `proj[1]` and
`proj[2]` in torch's MultiheadAttention, `x[..., :h]` and `x[..., h:]` of a gated layer. Each term is as large as the
whole, and mostly zeros. Where sizes are symbols, torch leaves slices too that take all of a dimension: the first of
`x[:, :-1]`.

Sound because an element of the sum is one element of a slice plus zeros: the same number (a zero may change its sign).
A slice of the same sizes is all of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import Compilation, aten, remove_dead, value
from fp8compile.passes.core.node_views import argument, first_input, node_argument
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import same_sizes


@dataclass(frozen=True)
class Scattered:
    """A slice `x` of dimension `dim` that lies from `start` to `end` among zeros."""

    x: fx.Node
    dim: int
    start: int
    end: int
    is_index: bool  # x has no such dimension


def concatenate(c: Compilation) -> None:
    """Replace each sum of slices that cover a tensor, and do not overlap, by a concatenation; one that covers all of it
    by what it puts there."""
    for node in [n for n in c.graph.nodes if _puts_all(n)]:
        replace_value(c, node, node_argument(node, "src"))
    slices: dict[fx.Node, Scattered] = {}
    covered: dict[fx.Node, tuple[int, int]] = {}  # of slices and sums of them: along which dimension, at most how much
    for node in list(c.graph.nodes):
        if (found := _scattered(node)) is not None:
            slices[node], covered[node] = found, (found.dim, found.end - found.start)
        elif _is_sum(node) and all(_is_term(term, node) and term in covered for term in node.all_input_nodes):
            (dim, one), (other_dim, other) = (covered[term] for term in node.all_input_nodes)
            if dim == other_dim:
                covered[node] = dim, one + other
                if one + other == value(node).shape[dim]:
                    _replace(c, node, [slices[leaf] for leaf in _leaves(node)])
    remove_dead(c.graph)


def _puts_all(node: fx.Node) -> bool:
    """Return True if nothing is left of what `node` puts a slice into."""
    if node.target is not aten.slice_scatter.default:
        return False
    x, whole = value(node_argument(node, "src")), value(node)
    return x.dtype == whole.dtype and same_sizes(x.shape, whole.shape)


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2


def _is_term(term: fx.Node, total: fx.Node) -> bool:
    """Return True if nothing but `total` reads a term, which is as large as that."""
    x, whole = value(term), value(total)
    return len(term.users) == 1 and x.dtype == whole.dtype and same_sizes(x.shape, whole.shape)


def _leaves(total: fx.Node) -> list[fx.Node]:
    """Return what a sum adds, sums within it taken apart."""
    found, pending = [], [total]
    while pending:
        node = pending.pop()
        if node.target is aten.add.Tensor:
            pending += node.all_input_nodes
        else:
            found.append(node)
    return found


def _scattered(node: fx.Node) -> Scattered | None:
    """Return what `node` puts among zeros, None if that is not what it does or its place is not known."""
    if node.target not in (aten.select_scatter.default, aten.slice_scatter.default):
        return None
    zeros, x = first_input(node), node_argument(node, "src")
    dim = argument(node, "dim") % value(zeros).dim()
    if not fusible.is_zero(zeros) or not isinstance(value(zeros).shape[dim], int):
        return None
    size = int(value(zeros).shape[dim])
    is_index = node.target is aten.select_scatter.default
    given = [argument(node, name) for name in (("index",) if is_index else ("start", "end", "step"))]
    if not all(number is None or isinstance(number, int) for number in given):
        return None
    start, end, step = (given[0] % size, given[0] % size + 1, 1) if is_index else slice(*given).indices(size)
    sizes = list(value(node).shape)
    sizes[dim : dim + 1] = [] if is_index else [end - start]
    alike = value(x).dtype == value(node).dtype and same_sizes(value(x).shape, sizes)
    return Scattered(x, dim, start, end, is_index) if step == 1 and alike else None


def _replace(c: Compilation, total: fx.Node, slices: list[Scattered]) -> None:
    """Replace a sum if its slices lie one behind the other along one dimension."""
    slices.sort(key=lambda s: s.start)
    dim = slices[0].dim
    if any(a.end != b.start for a, b in pairwise(slices)):
        return
    pieces = [c.emit(aten.unsqueeze.default, s.x, dim, like=total) if s.is_index else s.x for s in slices]
    replace_value(c, total, c.emit(aten.cat.default, pieces, dim, like=total))
