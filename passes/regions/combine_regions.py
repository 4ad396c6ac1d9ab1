"""Combine regions: fewer launches, and no copy where casts are concatenated.

1. What is concatenated for regions alone is read where it lies (`side_by_side`).
2. An amax that programs left in pieces is put together by the region that reads it, if the pieces are few; else by a
   region of its own (`amax_pieces`), as column sums are (`sum_pieces`). Those whose results only leave the graph become
   one.
3. Parts of a concatenation are written in place (`concatenated`).
4. A region that finds an amax and one that casts by it become one that casts in one pass (`one_pass_casts`).
5. What casts by one scale writes it for each row, where a matmul wants it so (`spread_scales`).
6. Small regions of one kind that the same matmul or region waits for, and that do not wait for each other, become one;
   so do those between two matmuls whose results only leave the graph (`join_regions`).
7. In forward graphs, so do the small regions of a layer that read its weights alone (`join_weights`).

Sound as long as no region waits for itself; every combination is checked for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.kernels.codegen.spec.region import PARTIALS, ROW_REDUCTIONS
from fp8compile.passes.core.compilation import aten, getitems, remove_dead
from fp8compile.passes.core.fusible import RESHAPES, is_library_kernel
from fp8compile.passes.core.node_views import Getitem, first_input
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.regions.amax_pieces import finish_amaxes, read_pieces
from fp8compile.passes.regions.concatenated import write_in_place
from fp8compile.passes.regions.join_regions import LARGE, MAX_PARTS, bytes_made, bytes_read, joined
from fp8compile.passes.regions.join_weights import join_weights
from fp8compile.passes.regions.one_pass_casts import cast_in_one_pass
from fp8compile.passes.regions.region_graph import (
    GraphEditor,
    is_from_region,
    put_in_order,
    regions_of,
    spec_of,
    tensors_of,
)
from fp8compile.passes.regions.side_by_side import read_side_by_side
from fp8compile.passes.regions.spread_scales import spread_scales
from fp8compile.passes.regions.sum_pieces import adds_pieces, finish_sums

PIECES, ANY_WARPS = "pieces", "any number of warps"


def run(c: HalfGraph) -> None:
    """Combine the regions of a half."""
    is_backward = c.half == "backward"
    combine_regions(c.graph, c.options.one_pass_casts and is_backward, weights=not is_backward)


def combine_regions(graph: fx.Graph, one_pass_casts: bool = False, weights: bool = False) -> None:
    """Rewrite the regions of `graph`; with `one_pass_casts`, large ones cast in one pass: of gradients, in backward;
    with `weights`, those of a layer's weights are joined."""
    editor = GraphEditor(graph)
    read_side_by_side(editor)
    read_pieces(graph)
    for cat in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        write_in_place(editor, cat)
    if one_pass_casts:
        cast_in_one_pass(editor)
    finish_amaxes(editor)
    finish_sums(editor)
    put_in_order(graph)
    remove_dead(graph)
    editor.number()
    spread_scales(editor)
    for node in list(graph.nodes):
        if node.target is ops.scaled_mm or node.target is ops.region:
            _combine_producers(editor, node)
    if weights:
        join_weights(editor, lambda node: None if _is_large(node) else _kind(node))
    _combine_saved(editor)
    _combine_last(editor)
    put_in_order(graph)
    remove_dead(graph)


def _combine_producers(editor: GraphEditor, consumer: fx.Node) -> None:
    """Combine the regions of one kind whose results `consumer` reads; what fits any kind joins the first."""
    made = dict.fromkeys(Getitem(i).source for i in consumer.all_input_nodes if is_from_region(i))
    producers = [node for node in made if not _is_large(node)]
    by_kind: dict[Any, list[fx.Node]] = {}
    for node in producers:
        kind = _kind(node)
        if kind is not None:
            by_kind.setdefault(kind, []).append(node)
    groups = {kind: nodes for kind, nodes in by_kind.items() if kind not in (ANY_WARPS, PIECES)}
    if groups:
        next(iter(groups.values())).extend(by_kind.pop(ANY_WARPS, []))
    for nodes in by_kind.values():
        if len(nodes) > 1:
            joined(editor, nodes)


def _is_large(node: fx.Node) -> bool:
    """Return True if a region's results had better be made when they are needed: a launch is nothing beside moving
    them, and made earlier they take memory meanwhile."""
    return bytes_made(node) > LARGE


def _kind(node: fx.Node) -> Any:
    """Return what regions must have in common to be combined; None for those that are left alone.

    A region that reduces rows is left: others, a weight's cast, may run long before, and it takes other tiles. Casts to
    one layout are as fast with 8 warps as with 4, and tiles with packed transposes have 8 or 16.
    """
    region, schedule = spec_of(node)
    if any(v.op in ROW_REDUCTIONS for p in region.parts for v in p.values) or is_one_pass(region):
        return None
    if all(p.values[s.value].op in PARTIALS for p in region.parts for s in p.stores):
        return PIECES
    layouts = [{s.transposed for s in p.stores if p.values[s.value].op == "quantize"} for p in region.parts]
    simple = [len(found) == 1 and schedule.warps <= 8 for found in layouts]
    if all(one or tiling.packed_transpose for one, tiling in zip(simple, schedule.tilings, strict=True)):
        return ANY_WARPS
    return schedule.warps, schedule.stages


def _combine_saved(editor: GraphEditor) -> None:
    """Combine casts that only leave the graph, where no matmul or attention lies between them: q, k and v, say."""
    output = editor.graph.output_node()
    waiting: dict[Any, list[fx.Node]] = {}
    for node in list(editor.graph.nodes):
        if node.target is ops.region:
            kind = _kind(node) if _only_leaves(node, output) else None
            if kind is not None:
                waiting.setdefault(kind, []).append(node)
        elif node.op == "output" or is_library_kernel(node):
            for nodes in waiting.values():
                if len(nodes) > 1:
                    joined(editor, nodes)
            waiting.clear()


def _combine_last(editor: GraphEditor) -> None:
    """Combine what only puts pieces together: amaxes and sums that leave the graph, and sums of one kernel's pieces.

    Pieces whose sums leave are kept until the last of them are there, so that they are few.
    """
    output = editor.graph.output_node()
    amaxes: list[list[fx.Node]] = [[]]
    sums: list[list[fx.Node]] = [[]]
    of_one_kernel: dict[Any, list[fx.Node]] = {}
    for node in regions_of(editor.graph):
        batches = amaxes if _is_amax(node) else sums if _is_sum(node) else None
        if batches is not None and _only_leaves(node, output):
            if len(batches[-1]) == MAX_PARTS or sum(map(bytes_read, [*batches[-1], node])) > LARGE:
                batches.append([])
            batches[-1].append(node)
        elif batches is sums:
            of_one_kernel.setdefault(first_input(tensors_of(node)[0]), []).append(node)
    for nodes in (*amaxes, *sums, *of_one_kernel.values()):
        if len(nodes) > 1:
            joined(editor, nodes)


def _is_amax(node: fx.Node) -> bool:
    region, _ = spec_of(node)
    return all(p.rows == 1 and [v.op for v in p.values[:2]] == ["load", "row_amax"] for p in region.parts)


def _is_sum(node: fx.Node) -> bool:
    return adds_pieces(spec_of(node)[0])


def _only_leaves(node: fx.Node, output: fx.Node) -> bool:
    readers: Iterable[fx.Node] = [u for item in getitems(node).values() for u in item.users]
    return all(u is output or (u.target in RESHAPES and set(u.users) == {output}) for u in readers)
