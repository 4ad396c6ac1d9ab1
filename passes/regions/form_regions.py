"""Form regions: clusters of fusible nodes around FP8 casts become one `fp8::region` each, a generated kernel.

Before      %h = mul(%xhat, %w)   %a = fp8.amax(%h, row)   %s = fp8.scale(%a, e4m3)   %q = fp8.quantize(%h, %s, …)
After       %r = fp8.region([%x, %w], …, spec)             %s = %r[1]                 %q = %r[0]

Runs on a forward or backward graph, after the cut. Every node has a level: how many borders (matmuls, attention, …) and
reductions over all rows lie before it on the longest path. A path between two nodes of one level crosses none of
these, so what is clustered by level never waits for itself. Sinks (payloads, column sums, amaxes of tensors) of one
level, one iteration space and with a tensor in common become one region; it also stores the values on its way that
others need. What lies on a lower level is recomputed where that moves fewer bytes than storing and loading it.

Statistics of rows need a program per row, transposed stores need square tiles: where a transposed payload depends on
statistics, another region computes these, and this one loads them.

Drawing random numbers takes a GPU longer than loading a mask of them. A region that draws them stores the mask that
backward reads; where Inductor draws them in any case, it loads that mask. Several regions may draw the same ones.

Regions without an FP8 payload or amax are left to Inductor, but for column sums next to row reductions (the backward
of a norm), which it would read twice for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.schedule.tiling import power_of_two
from fp8compile.kernels.codegen.spec.region import ELEMENT, ROW_REDUCTIONS, Region
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import is_tensor, remove_dead, value
from fp8compile.passes.core.iteration import NoAccessError
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.origin import source_line
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.core.walk import users_of, walk
from fp8compile.passes.regions.build_region import Builder
from fp8compile.passes.regions.cluster_loads import delayed, leaves_of
from fp8compile.passes.regions.clusters import Cluster, find_clusters, reduces_rows
from fp8compile.passes.regions.fusion_barriers import find_levels
from fp8compile.passes.regions.part_values import RefusedError
from fp8compile.passes.regions.region_graph import GraphEditor, put_in_order
from fp8compile.passes.regions.region_stores import sink_of, store_value

MAX_ORIGINS = 6


def run(c: HalfGraph) -> None:
    """Replace clusters by regions, and note why some casts are left to Inductor."""
    c.lowered.left += form_regions(c.graph)


def form_regions(graph: fx.Graph) -> list[str]:
    """Replace clusters of `graph` by regions; returns why some casts are left to Inductor."""
    editor = GraphEditor(graph)
    levels = find_levels(graph)
    reasons: list[str] = []
    clusters = delayed(graph, find_clusters(graph, levels, reasons), levels)
    order = sorted(clusters, key=lambda k: (-k.level, not k.transposed))
    sinks = {sink for cluster in clusters for sink in cluster.sinks}
    drawn = _find_drawn(graph)
    for cluster in order:
        reasons += _replace(editor, cluster, levels, sinks, drawn)
    _share_stored(editor)
    put_in_order(graph)
    remove_dead(graph)
    return reasons


def _replace(
    editor: GraphEditor, cluster: Cluster, levels: dict[fx.Node, int], others: set[fx.Node], drawn: set[fx.Node]
) -> list[str]:
    """Write the cluster's region into the graph; returns why a sink was left. others: the sinks of all clusters; drawn:
    what is made of random numbers alone."""
    is_leaf = leaves_of(cluster, levels)
    builder, reasons = _computed(cluster, is_leaf, levels, others, drawn)
    loaded = {node for node in builder.interior & drawn if _is_drawn_elsewhere(node, builder, drawn)}
    if loaded:
        builder, reasons = _computed(cluster, lambda node: node in loaded or is_leaf(node), levels, others, drawn)
    if not builder.sinks:
        return reasons
    own_sinks = sum(s.node in cluster.sinks for s in builder.sinks)
    part, tensors = builder.part()
    if editor.waits_for_itself(tensors, [s.node for s in builder.sinks]):  # through a value stored on the way
        stored = builder.sinks[own_sinks:]
        builder.sinks[own_sinks:] = [s for s in stored if not editor.waits_for_itself(tensors, [s.node])]
        part, tensors = builder.part()
    if not tensors:
        return [*reasons, f"%{builder.sinks[0].node.name}: it is made of constants alone"]
    if any(v.op in ROW_REDUCTIONS for v in part.values) and not _fits(part):
        return [*reasons, f"%{builder.sinks[0].node.name}: rows of {cluster.cols} are too long for column sums"]
    strides = tuple(tuple(builder.values.number(s) for s in value(t).stride()) for t in tensors)
    region = Region((part,), tuple(s.buffer for s in builder.sinks), _origins(builder), strides)
    if not choose_schedule.fits(choose_schedule.choose(region)):
        return [*reasons, f"%{builder.sinks[0].node.name}: its groups are too large for a program to hold"]
    if editor.waits_for_itself(tensors, [s.node for s in builder.sinks]):
        late = [s for s in cluster.sinks if _waits(editor, s, cluster, levels)]
        early = [s for s in cluster.sinks if s not in late]
        if not (late and early):
            return [*reasons, f"%{builder.sinks[0].node.name}: needs what is made of it"]
        halves = [replace(cluster, sinks=late), replace(cluster, sinks=early)]
        return [why for half in halves for why in _replace(editor, half, levels, others, drawn)]
    own = set(cluster.sinks)
    users = [
        list(s.node.users) if s.node in own else _outside(s.node, builder.interior | others) for s in builder.sinks
    ]
    try:
        named = builder.values.sizes  # with those of values that were given up
        sizes = [named[int(name[1:])] for name in region.sizes]
        editor.insert(region, tensors, sizes, [s.node for s in builder.sinks], users)
    except RefusedError as why:
        reasons.append(f"%{builder.sinks[0].node.name}: {why}")
    return reasons


def _share_stored(editor: GraphEditor) -> None:
    """Let casts that are left to Inductor read what a region stores, as others do: the scale of a concatenation, say.

    They were to be regions, which compute that again.
    """
    for node, stored in editor.replaced.items():
        for user in list(node.users):
            if user.target in ops.CASTS and not editor.waits_for_itself([stored], [user]):
                user.replace_input_with(node, stored)


def _computed(
    cluster: Cluster,
    is_leaf: Callable[[fx.Node], bool],
    levels: dict[fx.Node, int],
    others: set[fx.Node],
    drawn: set[fx.Node],
) -> tuple[Builder, list[str]]:
    """Return what computes the cluster's sinks, and behind them what others need of it; and why sinks were left."""
    builder, reasons = Builder(cluster.rows, cluster.cols, is_leaf), []
    for sink in (s for s in cluster.sinks if not s._erased):  # as what read it, when a region took its place
        try:
            builder.sinks.append(sink_of(builder, sink))
        except (RefusedError, NoAccessError) as why:
            if sink.target in ops.CASTS:
                reasons.append(f"%{sink.name}: {why}")
    if not builder.sinks:
        return builder, reasons
    statistics_elsewhere = cluster.transposed and reduces_rows(cluster, levels)
    for node in sorted(builder.interior, reverse=True):
        if statistics_elsewhere and node.target not in ops.CASTS:
            continue  # who computes the statistics computes this as well
        stands_here = levels[node] == cluster.level or (node in drawn and _is_returned(node, builder.interior))
        if stands_here and _is_needed(node, builder, others) and not _is_widened(node, builder):
            try:
                builder.sinks.append(store_value(builder, node))
            except (RefusedError, NoAccessError):  # then it stays where it is, and Inductor computes it
                continue
    return builder, reasons


def _find_drawn(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are made of random numbers alone: which elements a dropout drops."""
    drawn: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = [i for i in node.all_input_nodes if is_tensor(i) and i.target not in fusible.CONSTANTS]
        computed = fusible.is_fusible(node) and bool(inputs) and drawn.issuperset(inputs)
        if node.target in fusible.RANDOM or (computed and is_tensor(node)):
            drawn.add(node)
    return drawn


def _is_drawn_elsewhere(node: fx.Node, builder: Builder, drawn: set[fx.Node]) -> bool:
    """Return True if Inductor draws a node's random numbers in any case, so that the region can load the node.

    It does where it computes what is made of the node as well, and where the graph returns the node and the region does
    not store it: strides that are not row-major, say.
    """
    stored = {s.node for s in builder.sinks}
    readers = [user for user in node.users if user not in drawn and user.target is not ops.region]  # which loads it
    if node in stored or not readers:
        return False
    if any(user.op == "output" for user in readers):
        return True
    reached = walk(readers, users_of, through=lambda n: n in builder.interior and n not in stored)
    return any(n not in builder.interior and n not in stored and n.op != "output" for n in reached)


def _is_returned(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return True if outside of `inside` the graph's output alone reads a node, or a view of it, and regions."""
    return all(
        user.op == "output"
        or user in inside
        or user.target is ops.region
        or (user.target in fusible.LAYOUTS and _is_returned(user, inside))
        for user in node.users
    )


def _waits(editor: GraphEditor, sink: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Return True if a region of `sink` alone would load what is computed from a sink of its cluster: a norm over each
    head, say, of what is stored because a matmul reads it."""
    builder = Builder(cluster.rows, cluster.cols, leaves_of(cluster, levels))
    try:
        builder.sinks.append(sink_of(builder, sink))
    except (RefusedError, NoAccessError):
        return False
    return editor.waits_for_itself(builder.part()[1], cluster.sinks)


def _fits(part: Any) -> bool:
    """Return False where rows are too long: column sums need them whole in registers if rows are reduced as well."""
    if not any(v.op in ("col_sum", "col_amax") for v in part.values):
        return True
    wide = sum(i.extent == ELEMENT for i in part.inputs)
    return wide * power_of_two(part.cols) <= 8 * choose_schedule.MAX_ROW


def _is_needed(node: fx.Node, builder: Builder, sinks: set[fx.Node]) -> bool:
    """Return True if somebody outside of all regions reads a node that this region computes on its way, and no other
    region stores."""
    if not is_tensor(node) or node.target in fusible.LAYOUTS or node in sinks:
        return False
    return _read_outside(node, builder.interior | sinks)


def _is_widened(node: fx.Node, builder: Builder) -> bool:
    """Return True if a node is what the region loads, in a wider dtype: who needs that reads what is loaded."""
    if node.target not in fusible.CONVERSIONS:
        return False
    source = first_input(node)
    is_wider = value(source).dtype.itemsize < value(node).dtype.itemsize
    while source.target in fusible.LAYOUTS:
        source = first_input(source)
    return is_wider and source not in builder.interior


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(
        user not in inside or (user.target in fusible.LAYOUTS and _read_outside(user, inside)) for user in node.users
    )


def _outside(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Return the users of `node` that are not computed by regions, or are views which such a one reads."""
    return [
        user
        for user in node.users
        if user not in inside or (user.target in fusible.LAYOUTS and _read_outside(user, inside))
    ]


def _origins(builder: Builder) -> tuple[str, ...]:
    """Return the user's lines that the region's nodes come from, most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for node in (*builder.interior, *(s.node for s in builder.sinks)):
        line = source_line(node)
        if line:
            counts[line] += 1
    return tuple(sorted(counts, key=lambda line: (-counts[line], line))[:MAX_ORIGINS])
