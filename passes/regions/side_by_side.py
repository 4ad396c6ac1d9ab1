"""Side by side: regions read the pieces of a concatenation where they lie, and nothing is copied.

Before      %dqkv = cat([%dq, %dk, %dv], 2)   %q = region(%dqkv)
After       %q = region(%dq, %dk, %dv)        each tile of columns lies in one of the three

The gradients of q, k and v out of one matmul, say: attention's backward makes three tensors of them. Done where regions
alone read the concatenation, its pieces are laid out alike and lie in memory (what is computed element by element is
written into its place by Inductor), and each has a whole number of tiles. A part that reduces rows takes them whole, so
it reads the concatenation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec.region import MOST_BESIDE, ROW_REDUCTIONS, Input, Part, Region
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Concatenation, Permutation
from fp8compile.passes.core.compilation import aten, base, getitems, value
from fp8compile.passes.core.iteration import (
    Access,
    NoAccessError,
    by_dimension,
    contiguous,
    in_memory,
    permuted,
    split,
    tidy,
)
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.regions.region_graph import GraphEditor, rewrite, spec_of, tensors_of

LEAST = 32  # columns of a tile, of which a piece has a whole number


def read_side_by_side(editor: GraphEditor) -> None:
    """Let regions read the pieces of concatenations, where they can; their tiles may change, and what they count."""
    for cat in list(editor.graph.find_nodes(op="call_function", target=aten.cat.default)):
        readers = list(cat.users)
        if not _is_simple(cat) or not all(user.target is ops.region for user in readers):
            continue
        found = {reader: _reading(spec_of(reader)[0], tensors_of(reader), cat) for reader in readers}
        if all(found.values()):
            for reader, (region, tensors) in ((r, f) for r, f in found.items() if f is not None):
                rewrite(reader, tensors, region)
                editor.refresh(reader)
                for item in getitems(reader).values():
                    editor.refresh(item)
            editor.graph.erase_node(cat)


def _is_simple(cat: fx.Node) -> bool:
    """Return True if `cat` lies in memory element after element, and puts a few tensors of one shape together."""
    pieces, whole = Concatenation(cat).pieces, value(cat)
    tensors = [whole, *map(value, pieces)]
    if not 1 < len(pieces) <= MOST_BESIDE or not all(
        isinstance(s, int) for x in tensors for s in (*x.shape, *x.stride())
    ):
        return False
    kinds = {(x.dtype, tuple(x.shape)) for x in tensors[1:]}
    return len(kinds) == 1 and whole.dtype == tensors[1].dtype and list(whole.stride()) == contiguous(whole.shape)


def _reading(region: Region, tensors: list[fx.Node], cat: fx.Node) -> tuple[Region, list[fx.Node]] | None:
    """Return the region that reads the pieces of `cat` in place of it, and its tensors; None if it cannot."""
    old, owners = tensors.index(cat), [fusible.laid_out(piece) for piece in Concatenation(cat).pieces]
    if any(fusible.is_fusible(base(owner)) for owner in owners):
        return None
    more = tuple(range(len(tensors), len(tensors) + len(owners) - 1))
    parts = []
    for part in region.parts:
        try:
            inputs = [_beside(x, part, cat, more) if x.tensor == old else x for x in part.inputs]
        except NoAccessError:
            return None
        parts.append(replace(part, inputs=tuple(inputs)))
    strides: list[Any] = list(region.strides)
    strides[old], *others = (tuple(value(owner).stride()) for owner in owners)
    found = replace(region, parts=tuple(parts), strides=(*strides, *others))
    tilings = choose_schedule.choose(found).tilings
    if any(part.widths and tiling.block_cols < _least(part) for part, tiling in zip(parts, tilings, strict=True)):
        return None
    return found, [*tensors[:old], owners[0], *tensors[old + 1 :], *owners[1:]]


def _least(part: Part) -> int:
    """Return how many columns a tile has at least: whole groups."""
    return max(LEAST, *(cols for _, cols in part.extents))


def _beside(x: Input, part: Part, cat: fx.Node, more: tuple[int, ...]) -> Input:
    """Return `x`, which reads `cat`, as one that reads its pieces: its own tensor and `more`. Raises `NoAccessError`
    where the columns do not run through one piece after the other."""
    if x.offset or not x.rows or part.bands > 1 or any(v.op in ROW_REDUCTIONS for v in part.values):
        raise NoAccessError("rows are read whole, as one, or in bands: tiles are not to change")
    pieces, dim = Concatenation(cat).pieces, Concatenation(cat).dim
    shape = list(value(pieces[0]).shape)
    by_piece = [*shape[:dim], len(pieces), *shape[dim:]]
    (count, which, step), *cols = by_dimension(x.cols, by_piece) or [(0, -1, 0)]
    rows = by_dimension(x.rows, by_piece)
    if (count, which, step) != (len(pieces), dim, 1) or any(d in (dim, -1) for _, d, _ in (*rows, *cols)):
        raise NoAccessError("columns do not run through one piece after the other")
    strides = contiguous(shape)
    within = tidy(tuple((size, strides[d - (d > dim)] * step) for size, d, step in (*rows, *cols)))
    places = [split(_in_owner(piece, within), part.cols // len(pieces)) for piece in pieces]
    if any(place != places[0] for place in places) or not all(places[0]):
        raise NoAccessError("pieces are laid out in several ways")
    found = replace(x, rows=places[0][0], cols=places[0][1], beside=more)
    if found.extent != x.extent:
        raise NoAccessError("a piece repeats its elements, and stores were made for what varies")
    return found


def _in_owner(piece: fx.Node, access: Access) -> Access:
    """Return the access to a piece as places in the memory of its owner."""
    node, shape = piece, list(value(piece).shape)
    while node.target in fusible.RESHAPES or Permutation.of(node):
        if view := Permutation.of(node):
            access = permuted(access, list(value(node).shape), view.dims)
        node = first_input(node)
        shape = list(value(node).shape)
    return in_memory(access, shape, value(node).stride())
