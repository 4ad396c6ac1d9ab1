"""Concatenated: regions whose results are concatenated write into one buffer, each in its place.

Before      %q1 = region(%w1)[0]   %q2 = region(%w2)[0]   %q = cat([%q1, %q2], 0)
After       %q  = region(%w1, %w2)[0]                     one kernel of two parts that fill one buffer
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import fx

from fp8compile.kernels.codegen.spec.region import PARTIALS, Buffer, Region, Size, Store
from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.compilation import getitems, value
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.regions.join_regions import joined, name_among
from fp8compile.passes.regions.part_values import RefusedError
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, rewrite, sizes_of, spec_of, tensors_of


def write_in_place(editor: GraphEditor, cat: fx.Node) -> None:
    """Combine the regions whose buffers `cat` concatenates, and let them fill its result."""
    pieces, dim = Concatenation(cat).pieces, Concatenation(cat).dim
    if value(cat).dim() != 2 or not all(is_from_region(p) and len(p.users) == 1 for p in pieces):
        return
    if len(set(pieces)) != len(pieces) or not isinstance(value(cat).shape[dim], int):
        return
    try:
        starts = _starts(editor, cat)
    except RefusedError:
        return
    joint = joined(editor, list(dict.fromkeys(Getitem(p).source for p in pieces)))
    if joint is None:
        return
    region, _ = spec_of(joint.node)
    at = [joint.index[p] for p in Concatenation(cat).pieces]
    if not all(_writes_whole(region, n, dim) for n in at) or len({region.buffers[n].shape[1 - dim] for n in at}) > 1:
        return
    sizes = list(sizes_of(joint.node))
    offsets = {
        n: start if isinstance(start, int) else name_among(start, sizes) for n, start in zip(at, starts, strict=True)
    }
    rewrite(joint.node, tensors_of(joint.node), _filling_one(region, offsets, dim), sizes)
    editor.refresh(joint.node)
    whole = getitems(joint.node).get(at[0]) or editor.emit(
        operator.getitem, joint.node, at[0], before=joint.node.next, like=cat
    )
    editor.refresh(whole)
    cat.replace_all_uses_with(whole)
    editor.graph.erase_node(cat)
    _drop(editor, joint.node, at[1:])


def _starts(editor: GraphEditor, cat: fx.Node) -> list[Any]:
    """Return where each piece begins in the memory of the whole: numbers or nodes; raises `RefusedError` where the
    graph has nothing to compute one of."""
    pieces, dim = Concatenation(cat).pieces, Concatenation(cat).dim
    step = value(cat).shape[1] if dim == 0 else 1
    before = accumulate((value(p).shape[dim] for p in pieces[:-1]), initial=0)
    return [editor.size_node(n * step, cat) if n else 0 for n in before]


def _drop(editor: GraphEditor, node: fx.Node, dead: Sequence[int]) -> None:
    """Remove buffers that nobody reads and nothing fills from a region."""
    region, _ = spec_of(node)
    kept = [n for n in range(len(region.buffers)) if n not in dead]
    for n, item in getitems(node).items():
        if n in dead:
            editor.graph.erase_node(item)
        else:
            item.args = (node, kept.index(n))
    parts = tuple(
        replace(p, stores=tuple(replace(s, buffer=kept.index(s.buffer)) for s in p.stores)) for p in region.parts
    )
    rewrite(node, tensors_of(node), replace(region, parts=parts, buffers=tuple(region.buffers[n] for n in kept)))
    editor.refresh(node)


def _writes_whole(region: Region, buffer: int, dim: int) -> bool:
    """Return True if one plain store fills this buffer, row by row, and adds nothing along `dim`, a known size."""
    stores = [(p, s) for p in region.parts for s in p.stores if s.buffer == buffer]
    if len(stores) != 1 or not isinstance(region.buffers[buffer].shape[dim], int):
        return False
    part, store = stores[0]
    along_rows = (dim == 0) != store.transposed
    return part.values[store.value].op not in PARTIALS and (
        (store.row_multiple if along_rows else store.col_multiple) == 1
    )


def _filling_one(region: Region, offsets: dict[int, Size], dim: int) -> Region:
    """Return `region` with the buffers at these offsets of one, along `dim`, in the place of the first; the others
    stay, empty."""
    buffers = list(region.buffers)
    first, *others = offsets
    total = sum(buffers[n].shape[dim] for n in offsets)

    def moved(store: Store) -> Store:
        if store.buffer not in offsets:
            return store
        return replace(store, buffer=first, lead=total if dim == 1 else store.lead, offset=offsets[store.buffer])

    whole = list(buffers[first].shape)
    whole[dim] = total
    dtype = buffers[first].dtype
    for n in others:
        buffers[n] = Buffer((0,), dtype)
    buffers[first] = Buffer(tuple(whole), dtype)
    parts = tuple(replace(p, stores=tuple(map(moved, p.stores))) for p in region.parts)
    return replace(region, parts=parts, buffers=tuple(buffers))
