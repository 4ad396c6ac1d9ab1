"""Side by side: regions read the pieces of a concatenation where they lie, and nothing is copied.

Before      %dqkv = cat([%dq, %dk, %dv], 2)   %q = region(%dqkv)
After       %q = region(%dq, %dk, %dv)        each tile of columns lies in one of the three

The gradients of q, k and v out of one matmul, say: attention's backward makes three tensors of them. Done where regions
alone read the concatenation, its pieces are laid out alike and lie in memory (what is computed element by element is
written into its place by Inductor), and each has a whole number of tiles. A part that reduces rows takes them whole, so
it reads the concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec.region import ROW_REDUCTIONS, Digits, Input, Part, Region
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.compilation import aten, base, getitems, value
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.regions.region_graph import GraphEditor, rewrite, spec_of, tensors_of

MOST = 4  # pieces: each tile asks which is its own
LEAST = 32  # columns of a tile, of which a piece has a whole number
COPIES = {aten.clone.default}


@dataclass(frozen=True)
class Dimension:
    """A dimension of a concatenation: its size, and its strides there and in a piece; None where it counts pieces."""

    size: int
    stride: int
    in_piece: int | None


def read_side_by_side(editor: GraphEditor) -> None:
    """Let regions read the pieces of concatenations, where they can; their tiles may change, and what they count."""
    for cat in list(editor.graph.find_nodes(op="call_function", target=aten.cat.default)):
        pieces = _pieces(cat)
        readers = list(cat.users)
        if not pieces or not all(user.target is ops.region for user in readers):
            continue
        dims = _dimensions(cat, pieces[0])
        found = {reader: _reading(spec_of(reader)[0], tensors_of(reader), cat, pieces, dims) for reader in readers}
        if all(found.values()):
            for reader, (region, tensors) in ((r, f) for r, f in found.items() if f is not None):
                rewrite(reader, tensors, region)
                editor.refresh(reader)
                for item in getitems(reader).values():
                    editor.refresh(item)
            editor.graph.erase_node(cat)


def _pieces(cat: fx.Node) -> list[fx.Node]:
    """Return the tensors that `cat` puts together, if they are laid out alike and lie in memory; else none."""
    pieces = list(map(_source, Concatenation(cat).pieces))
    sizes = [s for x in map(value, (cat, *pieces)) for s in (*x.shape, *x.stride())]
    if not 1 < len(pieces) <= MOST or not all(isinstance(s, int) for s in sizes):
        return []
    kinds = {(value(p).dtype, tuple(value(p).shape), tuple(value(p).stride())) for p in pieces}
    if len(kinds) != 1 or value(cat).dtype != value(pieces[0]).dtype:
        return []
    return [] if any(fusible.is_fusible(base(p)) for p in pieces) else pieces


def _source(piece: fx.Node) -> fx.Node:
    """Return what `piece` is a mere copy of, laid out in another way."""
    while piece.target in COPIES:
        piece = first_input(piece)
    return piece


def _dimensions(cat: fx.Node, piece: fx.Node) -> list[Dimension]:
    """Return the dimensions of `cat`, that along which it concatenates as two: pieces, and what is in one."""
    found = []
    for n, (size, stride) in enumerate(zip(value(cat).shape, value(cat).stride(), strict=True)):
        in_piece, within = value(piece).stride(n), value(piece).shape[n]
        if n == Concatenation(cat).dim:
            found.append(Dimension(size // within, within * stride, None))
        found.append(Dimension(within, stride, in_piece))
    return [dim for dim in found if dim.size > 1]


def _reading(
    region: Region, tensors: list[fx.Node], cat: fx.Node, pieces: list[fx.Node], dims: Sequence[Dimension]
) -> tuple[Region, list[fx.Node]] | None:
    """Return the region that reads `pieces` in place of `cat`, and its tensors; None if it cannot."""
    old = tensors.index(cat)
    more = range(len(tensors), len(tensors) + len(pieces) - 1)
    parts = []
    for part in region.parts:
        inputs = [_beside(x, part, dims, more) if x.tensor == old else x for x in part.inputs]
        if not all(inputs):
            return None
        parts.append(replace(part, inputs=tuple(x for x in inputs if x is not None)))
    strides = list(region.strides)
    strides[old] = tuple(value(pieces[0]).stride())
    strides += [strides[old] for _ in more]
    found = replace(region, parts=tuple(parts), strides=tuple(strides))
    tilings = choose_schedule.choose(found).tilings
    if any(part.widths and tiling.block_cols < _least(part) for part, tiling in zip(parts, tilings, strict=True)):
        return None
    return found, [*tensors[:old], pieces[0], *tensors[old + 1 :], *pieces[1:]]


def _least(part: Part) -> int:
    """Return how many columns a tile has at least: whole groups."""
    return max(LEAST, *(cols for _, cols in part.extents))


def _beside(x: Input, part: Part, dims: Sequence[Dimension], more: range) -> Input | None:
    """Return `x`, which reads a concatenation, as one that reads pieces: its own tensor and `more`; None where the
    columns do not run through one after the other."""
    if x.offset or any(v.op in ROW_REDUCTIONS for v in part.values):
        return None
    rows, cols = _along(x.rows, dims), _along(x.cols, dims)
    if not rows or not cols or cols[0][0].in_piece is not None or cols[0][1:] != (1, len(more) + 1):
        return None
    if any(dim.in_piece is None for dim, _, _ in (*rows, *cols[1:])) or len(cols) == 1:
        return None
    in_piece = [_digits(steps) for steps in (rows, cols[1:])]
    return replace(x, rows=in_piece[0], cols=in_piece[1], beside=tuple(more))


Steps = list[tuple[Dimension, int, int]]


def _along(digits: Digits, dims: Sequence[Dimension]) -> Steps | None:
    """Return along which dimensions digits run, by what step and how often, outermost first; None if it is unclear."""
    found: Steps = []
    for size, stride in reversed(digits):
        if not isinstance(size, int) or not isinstance(stride, int):
            return None
        while size > 1:
            dim = next((d for d in dims if d.stride <= stride < d.stride * d.size and stride % d.stride == 0), None)
            if dim is None or dim.size % (step := stride // dim.stride):
                return None
            count = min(size, dim.size // step)
            if size % count:
                return None
            found.append((dim, step, count))
            size, stride = size // count, stride * count
    return found[::-1]


def _digits(steps: Steps) -> Digits:
    """Return steps along dimensions of a piece as digits; two that run on from one to the other are one."""
    found: list[tuple[int, int]] = []
    for dim, step, count in steps:
        assert dim.in_piece is not None
        stride = step * dim.in_piece
        if found and found[-1][1] == count * stride:
            found[-1] = (found[-1][0] * count, stride)
        else:
            found.append((count, stride))
    return tuple(found)
