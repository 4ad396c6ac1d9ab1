"""Concatenated: regions whose results are concatenated write into one buffer, each in its place.

Before      %q1 = region(%w1)[0]   %q2 = region(%w2)[0]   %q = cat([%q1, %q2], 0)
After       %q  = region(%w1, %w2)[0]                     one kernel of two parts that fill one buffer
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile.kernels.codegen.spec.region import PARTIALS, Buffer, Region, Store
from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.compilation import getitems, value
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.regions.join_regions import joined
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, rewrite, spec_of, tensors_of


def write_in_place(editor: GraphEditor, cat: fx.Node) -> None:
    """Combine the regions whose buffers `cat` concatenates, and let them fill its result."""
    pieces, dim = Concatenation(cat).pieces, Concatenation(cat).dim
    if value(cat).dim() != 2 or not all(is_from_region(p) and len(p.users) == 1 for p in pieces):
        return
    if len(set(pieces)) != len(pieces) or not all(isinstance(s, int) for s in value(cat).shape):
        return
    joint = joined(editor, list(dict.fromkeys(Getitem(p).source for p in pieces)))
    if joint is None:
        return
    region, _ = spec_of(joint.node)
    at = [joint.index[p] for p in Concatenation(cat).pieces]
    if not all(_writes_whole(region, n) for n in at):
        return
    rewrite(joint.node, tensors_of(joint.node), _filling_one(region, at, value(cat), dim))
    editor.refresh(joint.node)
    whole = getitems(joint.node).get(at[0]) or editor.emit(
        operator.getitem, joint.node, at[0], before=joint.node.next, like=cat
    )
    editor.refresh(whole)
    cat.replace_all_uses_with(whole)
    editor.graph.erase_node(cat)
    _drop(editor, joint.node, at[1:])


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


def _writes_whole(region: Region, buffer: int) -> bool:
    """Return True if one plain store fills this buffer, row by row."""
    stores = [(p, s) for p in region.parts for s in p.stores if s.buffer == buffer]
    if len(stores) != 1 or not all(isinstance(d, int) for d in region.buffers[buffer].shape):
        return False
    part, store = stores[0]
    return part.values[store.value].op not in PARTIALS and store.row_multiple == store.col_multiple == 1


def _filling_one(region: Region, at: list[int], whole: Any, dim: int) -> Region:
    """Return `region` with the buffers `at` side by side along `dim` in the place of the first; the others stay,
    empty."""
    width = whole.shape[1]
    offsets, start = {}, 0
    for n in at:
        offsets[n] = start * (width if dim == 0 else 1)
        start += region.buffers[n].shape[dim]

    def moved(store: Store) -> Store:
        if store.buffer not in offsets:
            return store
        return replace(store, buffer=at[0], lead=width, offset=offsets[store.buffer])

    buffers = list(region.buffers)
    dtype = buffers[at[0]].dtype
    for n in at[1:]:
        buffers[n] = Buffer((0,), dtype)
    buffers[at[0]] = Buffer(tuple(whole.shape), dtype)
    parts = tuple(replace(p, stores=tuple(map(moved, p.stores))) for p in region.parts)
    return replace(region, parts=parts, buffers=tuple(buffers))
