"""Join the casts of a layer's weights: one launch finds their amaxes, and one casts them.

Before      %p = region(%w)[0]      %q = region(%w, %p)[0]        for each weight, in front of its matmul
            %r = region(%v)[0]      %s = region(%v, %r)[0]
After       %p, %r = region(%w, %v)     %q, %s = region(%w, %v, %p, %r)

A launch takes the host longer than casting a small weight takes the GPU. Sound, as these regions read nothing but what
the graph is given: nothing that it computes is waited for. Done in forward graphs, where each of the two is a launch a
matmul, and for weights of `LARGE` bytes together at most: results are made before the last of them is needed, and what
was read for an amax is to be still in the cache when it is cast.

No two regions of a launch are alike: the next layer begins where the first weight comes again, so that all layers have
the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8compile.passes.core.compilation import VIEWS
from fp8compile.passes.core.marker_views import RegionCall
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.regions.join_regions import LARGE, MAX_PARTS, bytes_read, joined
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, regions_of, spec_of


def join_weights(editor: GraphEditor, kind_of: Callable[[fx.Node], Any]) -> None:
    """Join regions that read inputs of the graph alone, then those that read results of theirs.

    kind_of: returns what regions must have in common to be joined; None for one that is left alone.
    """
    first = [node for node in regions_of(editor.graph) if _reads(node, set())]
    after = _join(editor, first, kind_of)
    _join(editor, [node for node in regions_of(editor.graph) if node not in after and _reads(node, after)], kind_of)


def _reads(node: fx.Node, made: set[fx.Node]) -> bool:
    """Return True if a region reads nothing but inputs of the graph, and results of the regions in `made`."""
    return all(_is_given(i) or (is_from_region(i) and Getitem(i).source in made) for i in node.all_input_nodes)


def _is_given(node: fx.Node) -> bool:
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _join(editor: GraphEditor, regions: Sequence[fx.Node], kind_of: Callable[[fx.Node], Any]) -> set[fx.Node]:
    """Join what can be joined of `regions`; return what is there in their place."""
    by_kind: dict[Any, list[fx.Node]] = {}
    found = set[fx.Node]()
    for node in regions:
        kind = kind_of(node)
        if kind is None:
            found.add(node)
        else:
            by_kind.setdefault(kind, []).append(node)
    for nodes in by_kind.values():
        for batch in _batches(nodes):
            one = joined(editor, batch)
            found.update(batch if one is None else [one.node])
    return found


def _batches(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes in batches that are launched together, in order."""
    batches: list[list[fx.Node]] = []
    specs, parts, size = set[str](), 0, 0
    for node in nodes:
        spec, more, moved = RegionCall(node).spec, len(spec_of(node)[0].parts), bytes_read(node)
        if not batches or spec in specs or parts + more > MAX_PARTS or size + moved > LARGE:
            batches.append([])
            specs, parts, size = set(), 0, 0
        batches[-1].append(node)
        specs.add(spec)
        parts, size = parts + more, size + moved
    return batches
