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

Regions without an FP8 payload or amax are left to Inductor, but for column sums next to row reductions (the backward
of a norm), which it would read twice for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.kernels import schedule as schedules
from fp8compile.kernels.spec import ELEMENT, ROW_REDUCTIONS, Buffer, Region, Store
from fp8compile.passes import fusible
from fp8compile.passes.build_region import Builder, CastLayout, RefusedError, Sink
from fp8compile.passes.compilation import VIEWS, depends_on, is_tensor, value
from fp8compile.passes.iteration import NoAccessError, contiguous, divides, product, same
from fp8compile.passes.origin import source_line
from fp8compile.passes.region_graph import GraphEditor, put_in_order

MAX_ORIGINS = 6


@dataclass
class Cluster:
    """Sinks that shall be computed together, over rows × cols."""

    rows: Any
    cols: int
    level: int
    transposed: bool
    sinks: list[fx.Node]
    reads: set[fx.Node] = field(default_factory=set)  # full-size tensors and values that its sinks are made of


def form_regions(graph: fx.Graph) -> list[str]:
    """Replace clusters of `graph` by regions; returns why some casts are left to Inductor."""
    editor = GraphEditor(graph)
    levels = find_levels(graph)
    reasons: list[str] = []
    clusters = _delayed(graph, _clusters(graph, levels, reasons), levels)
    order = sorted(clusters, key=lambda k: (-k.level, not k.transposed))
    for cluster in order:
        reasons += _replace(editor, cluster, levels, clusters)
    put_in_order(graph)
    graph.eliminate_dead_code()
    return reasons


# ---- levels ---------------------------------------------------------------------------------------------------------


def find_levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node the number of borders and reductions over all rows on the longest path before it."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        levels[node] = max((levels[i] + _is_barrier(i) for i in node.all_input_nodes), default=0)
    return levels


def _is_barrier(node: fx.Node) -> bool:
    """Whether what reads `node` cannot be in one kernel with what `node` reads."""
    if node.op != "call_function":
        return False
    if fusible.is_global_amax(node) or fusible.is_col_sum(node) or node.target is ops.quantize:
        return True
    if fusible.is_fusible(node):
        return False
    views = node.target in VIEWS or not is_tensor(node) or "getitem" in str(node.target)
    return not (views and all(not fusible.is_fusible(i) for i in node.all_input_nodes))


# ---- clusters -------------------------------------------------------------------------------------------------------


def _clusters(graph: fx.Graph, levels: dict[fx.Node, int], reasons: list[str]) -> list[Cluster]:
    singles = [k for node in graph.nodes if (k := _single(node, levels, reasons)) is not None]
    by_space: dict[Any, list[Cluster]] = defaultdict(list)
    for k in singles:
        by_space[(k.level, str(k.rows), k.cols, k.transposed)].append(k)
    merged = [m for group in by_space.values() for m in _connected(group)]
    joined = []
    by_space.clear()
    for k in merged:
        by_space[(k.level, str(k.rows), k.cols)].append(k)
    for group in by_space.values():  # transposed stores go with others of their level where no row is reduced
        plain = [k for k in group if not _reduces_rows(k, levels)]
        joined += _connected(plain) + [k for k in group if k not in plain]
    return [k for k in joined if _is_worth_a_kernel(k, levels)]


def _single(node: fx.Node, levels: dict[fx.Node, int], reasons: list[str]) -> Cluster | None:
    """The cluster of this one sink; None if it is none, or of a kind that no region takes."""
    source = _source(node)
    if source is None and _is_value(node):
        source = node
    if source is None or not is_tensor(source):
        return None
    shape = list(value(source).shape)
    if len(shape) < 1 or value(source).dtype not in fusible.FLOATS:
        return None
    why = _why_not(node, shape)
    if why:
        if node.target in ops.CASTS:
            reasons.append(f"%{node.name}: {why}")
        return None
    transposed = False
    if node.target is ops.quantize:
        layout = CastLayout.of(node)
        transposed = layout.transpose or layout.granularity.kind == "block"
    cluster = Cluster(product(shape) // shape[-1], shape[-1], levels[node], transposed, [node])
    cluster.reads = _reads(cluster, levels)
    return cluster


def _why_not(node: fx.Node, shape: list[Any]) -> str:
    """Why no region runs over a tensor of this shape for the sink `node`; "" if one can."""
    cols = shape[-1]
    if not isinstance(cols, int):
        return "its rows have a symbolic length"
    if any(isinstance(n, int) and n == 0 for n in shape):
        return "it is empty"
    if any(isinstance(n, torch.SymInt) and not n.node.has_hint() for n in shape):
        return "it has a size that only the data knows"
    if fusible.is_global_amax(node) and node.args[1] == "row":
        if len(shape) != 2:
            return "a batch is transposed matrix by matrix"
        return "amaxes of columns, filled up" if CastLayout.of(node).row_multiple != 1 else ""
    return _why_no_payload(CastLayout.of(node), shape) if node.target is ops.quantize else ""


def _why_no_payload(layout: CastLayout, shape: list[Any]) -> str:
    kind, size = layout.granularity.kind, layout.granularity.size
    if len(shape) != 2 and layout.transpose:
        return "a batch is transposed matrix by matrix"
    if len(shape) != 2 and (layout.row_multiple, layout.col_multiple) != (1, 1):
        return "a batch is filled up matrix by matrix"
    if size & (size - 1):
        return f"groups of {size}, which is no power of two"
    lengths = shape[-2:] if kind == "block" else [shape[0] if layout.transpose else shape[-1]] if size else []
    if not all(divides(size, n) for n in lengths):
        return f"{layout.granularity} does not divide {shape}"
    return ""


def _source(node: fx.Node) -> fx.Node | None:
    """The tensor that a sink runs over; None if `node` is no sink."""
    if node.target is ops.quantize or fusible.is_col_sum(node):
        return node.args[0]  # type: ignore[return-value]
    if fusible.is_global_amax(node):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if source.target is ops.amax and CastLayout.of(source).granularity.kind != "tensor":
            return source.args[0] if not fusible.is_global_amax(source) else None  # type: ignore[return-value]
        return source
    return None


def _is_value(node: fx.Node) -> bool:
    """Whether `node` is something that must be stored, because what reads it is no part of a region."""
    if not is_tensor(node) or node.target in fusible.LAYOUTS or not fusible.is_pointwise(node):
        return False
    if _is_narrowed_elsewhere(node):
        return False
    return value(node).dim() > 0 and value(node).dtype in fusible.FLOATS and _is_read_by_border(node)


def _reads(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Full-size nodes that the sinks are made of, down to the first ones of a lower level."""
    found: set[fx.Node] = set()
    stack = [i for sink in cluster.sinks for i in (sink, *sink.all_input_nodes)]
    total = cluster.rows * cluster.cols
    while stack:
        node = stack.pop()
        if node in found or not is_tensor(node) or not same(fusible.elements(node), total):
            if node not in found and is_tensor(node) and fusible.is_fusible(node) and levels[node] == cluster.level:
                found.add(node)
                stack += node.all_input_nodes
            continue
        found.add(node)
        if fusible.is_fusible(node):
            stack += node.all_input_nodes
    return {n for n in found if same(fusible.elements(n), total)}


def _connected(clusters: list[Cluster]) -> list[Cluster]:
    """Clusters joined where they read something in common."""
    owner: dict[fx.Node, int] = {}
    parent = list(range(len(clusters)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for n, k in enumerate(clusters):
        for node in k.reads:
            a, b = root(n), root(owner.setdefault(node, n))
            parent[max(a, b)] = min(a, b)
    groups: dict[int, Cluster] = {}
    for n, k in enumerate(clusters):
        first = groups.setdefault(root(n), clusters[root(n)])
        if first is not k:
            _absorb(first, k)
    return list(groups.values())


def _absorb(a: Cluster, b: Cluster) -> None:
    a.sinks += b.sinks
    a.reads |= b.reads
    a.transposed |= b.transposed
    a.level = max(a.level, b.level)


def _reduces_rows(cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Whether a statistic of rows must be computed before a sink of this cluster."""
    stack = [i for sink in cluster.sinks for i in sink.all_input_nodes]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if levels.get(node, -1) < cluster.level or not fusible.is_fusible(node):
            continue
        if _is_statistic(node):
            return True
        fresh = [i for i in node.all_input_nodes if i not in seen]
        seen.update(fresh)
        stack += fresh
    return False


def _is_statistic(node: fx.Node) -> bool:
    """Whether `node` is a reduction along rows."""
    if fusible.is_row_reduction(node):
        return True
    return node.target is ops.amax and node.args[1] == "row" and not fusible.is_global_amax(node)


def _is_worth_a_kernel(cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    fp8 = any(s.target in ops.CASTS for s in cluster.sinks)
    return fp8 or (_reduces_rows(cluster, levels) and any(fusible.is_col_sum(s) for s in cluster.sinks))


def _delayed(graph: fx.Graph, clusters: list[Cluster], levels: dict[fx.Node, int]) -> list[Cluster]:
    """Let a transposed payload of a lower level wait for the next region that loads the same tensors anyway."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    loads = {id(k): _loads(k, levels) for k in clusters if k.transposed}
    kept: list[Cluster] = []
    for k in sorted(clusters, key=lambda k: -k.level):
        hosts = [h for h in reversed(kept) if h.level > k.level and _can_wait(k, h, loads, order)]
        if hosts:
            _absorb(hosts[0], k)
        else:
            kept.append(k)
    return kept


def _can_wait(k: Cluster, host: Cluster, loads: dict[int, set[fx.Node]], order: dict[fx.Node, int]) -> bool:
    if not (k.transposed and host.transposed and str(k.rows) == str(host.rows) and k.cols == host.cols):
        return False
    if not loads[id(k)] & loads[id(host)] or any(s.target is not ops.quantize for s in k.sinks):
        return False
    return not depends_on([i for s in host.sinks for i in s.all_input_nodes], set(k.sinks), order)


def _loads(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """The full-size tensors that a region of this cluster loads."""
    frontier = _frontier(cluster, levels)
    dear = _dear(cluster, frontier, levels)
    own = {i for n in cluster.reads if levels[n] == cluster.level for i in (n, *n.all_input_nodes)}
    direct = {n for n in own if not fusible.is_fusible(n)}
    return direct | dear | {s for n in frontier - dear for s in _full_sources(n, cluster, levels)}


# ---- from cluster to region -----------------------------------------------------------------------------------------


def _replace(editor: GraphEditor, cluster: Cluster, levels: dict[fx.Node, int], clusters: list[Cluster]) -> list[str]:
    """Write the cluster's region into the graph; returns why a sink was left."""
    reasons = []
    builder = Builder(cluster.rows, cluster.cols, _leaves(cluster, levels))
    for sink in cluster.sinks:
        try:
            builder.sinks.append(_sink(builder, sink))
        except (RefusedError, NoAccessError) as why:
            if sink.target in ops.CASTS:
                reasons.append(f"%{sink.name}: {why}")
    if not builder.sinks:
        return reasons
    others = {s for k in clusters for s in k.sinks}
    statistics_elsewhere = cluster.transposed and _reduces_rows(cluster, levels)
    own_sinks = len(builder.sinks)
    for node in sorted(builder.interior, key=editor.order.__getitem__, reverse=True):
        if statistics_elsewhere and node.target not in ops.CASTS:
            continue  # who computes the statistics computes this as well
        if levels[node] == cluster.level and _is_needed(node, builder, others):
            try:
                builder.sinks.append(_stored(builder, node))
            except (RefusedError, NoAccessError):  # then it stays where it is, and Inductor computes it
                continue
    part, tensors = builder.part()
    if editor.waits_for_itself(tensors, [s.node for s in builder.sinks]):  # through a value stored on the way
        stored = builder.sinks[own_sinks:]
        builder.sinks[own_sinks:] = [s for s in stored if not editor.waits_for_itself(tensors, [s.node])]
        part, tensors = builder.part()
    if any(v.op in ROW_REDUCTIONS for v in part.values) and not _fits(part):
        return [*reasons, f"%{builder.sinks[0].node.name}: rows of {cluster.cols} are too long for column sums"]
    strides = tuple(tuple(builder.number(s) for s in value(t).stride()) for t in tensors)
    region = Region((part,), tuple(s.buffer for s in builder.sinks), _origins(builder), strides)
    if editor.waits_for_itself(tensors, [s.node for s in builder.sinks]):
        late = [s for s in cluster.sinks if _waits(editor, s, cluster, levels)]
        early = [s for s in cluster.sinks if s not in late]
        if not (late and early):
            return [*reasons, f"%{builder.sinks[0].node.name}: needs what is made of it"]
        halves = [replace(cluster, sinks=late), replace(cluster, sinks=early)]
        return [why for half in halves for why in _replace(editor, half, levels, clusters)]
    own = set(cluster.sinks)
    users = [
        list(s.node.users) if s.node in own else _outside(s.node, builder.interior | others) for s in builder.sinks
    ]
    try:
        sizes = [builder.sizes[int(name[1:])] for name in region.sizes]  # without those of values that were given up
        editor.insert(region, tensors, sizes, [s.node for s in builder.sinks], users)
    except RefusedError as why:
        reasons.append(f"%{builder.sinks[0].node.name}: {why}")
    return reasons


def _waits(editor: GraphEditor, sink: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Whether a region of `sink` alone would load what is computed from a sink of its cluster: a norm over each head,
    say, of what is stored because a matmul reads it."""
    builder = Builder(cluster.rows, cluster.cols, _leaves(cluster, levels))
    try:
        builder.sinks.append(_sink(builder, sink))
    except (RefusedError, NoAccessError):
        return False
    return editor.waits_for_itself(builder.part()[1], cluster.sinks)


def _fits(part: Any) -> bool:
    """Column sums need whole rows in registers where rows are reduced as well."""
    if not any(v.op in ("col_sum", "col_amax") for v in part.values):
        return True
    wide = sum(i.extent == ELEMENT for i in part.inputs)
    return wide * schedules.power_of_two(part.cols) <= 8 * schedules.MAX_ROW


def _leaves(cluster: Cluster, levels: dict[fx.Node, int]) -> Any:
    """Which fusible nodes the cluster's region loads: column results, statistics where its stores are transposed or
    from a lower level, and what is cheaper to load than to compute again."""
    frontier = _frontier(cluster, levels)
    dear = _dear(cluster, frontier, levels)

    def is_leaf(node: fx.Node) -> bool:
        if node not in levels or fusible.is_col_sum(node) or fusible.is_global_amax(node):
            return True  # not in levels: made of a region's results
        lower = levels[node] < cluster.level
        statistic = _is_statistic(node) or fusible.is_moment(node)
        if statistic and (cluster.transposed or (lower and not _shares_level(node, cluster, levels))):
            return True
        return node in dear or _is_narrowed_elsewhere(node)

    return is_leaf


def _is_narrowed_elsewhere(node: fx.Node) -> bool:
    """Whether `node` is a conversion to fewer bytes that Inductor can do as it writes the value: then we read fewer."""
    if node.target not in fusible.CONVERSIONS:
        return False
    source = node.all_input_nodes[0]
    while source.target in fusible.LAYOUTS:
        source = source.all_input_nodes[0]
    if source.op != "call_function":
        return False
    narrower = _bytes(node) < _bytes(source)
    return narrower and not fusible.is_fusible(source) and not fusible.is_opaque(source)


def _shares_level(node: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Whether a sink of the cluster stands on the node's own level (it was delayed)."""
    return any(levels[s] == levels[node] for s in cluster.sinks)


def _frontier(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Full-size fusible nodes of lower levels that nodes of the cluster's own levels read."""
    own = {levels[s] for s in cluster.sinks}
    total = cluster.rows * cluster.cols
    found: set[fx.Node] = set()
    stack = list(cluster.sinks)
    seen = set(stack)
    while stack:
        for i in stack.pop().all_input_nodes:
            if i in seen or i not in levels or not fusible.is_fusible(i):
                continue
            seen.add(i)
            if levels[i] in own:
                stack.append(i)
            elif is_tensor(i) and i.target not in fusible.LAYOUTS and same(fusible.elements(i), total):
                found.add(i)
            else:
                stack.append(i)
    return found


def _dear(cluster: Cluster, frontier: set[fx.Node], levels: dict[fx.Node, int]) -> set[fx.Node]:
    """The part of the frontier that is loaded: recomputing it would read more than storing and loading it moves.

    What lies in memory in any case, because a border reads it, is loaded unless it is a mere copy of something.
    """
    sources = {node: _full_sources(node, cluster, levels) for node in frontier}
    in_memory = {n for n in frontier if _is_read_by_border(n)}
    dear = {n for n in in_memory if len(sources[n]) > 1 or _bytes(n) <= sum(map(_bytes, sources[n]))}
    for group in _sharing(frontier - dear, sources):
        reading = sum(map(_bytes, {s for n in group for s in sources[n]}))
        if reading >= sum(2 * _bytes(n) for n in group):
            dear |= group
    return dear


def _sharing(nodes: set[fx.Node], sources: dict[fx.Node, set[fx.Node]]) -> list[set[fx.Node]]:
    """Nodes in groups that are computed from the same tensors."""
    groups: list[tuple[set[fx.Node], set[fx.Node]]] = []
    for node in nodes:
        members, reads = {node}, set(sources[node])
        for group in [g for g in groups if g[1] & reads]:
            groups.remove(group)
            members, reads = members | group[0], reads | group[1]
        groups.append((members, reads))
    return [members for members, _ in groups]


def _is_read_by_border(node: fx.Node) -> bool:
    return any(_is_read_by_border(u) if u.target in fusible.LAYOUTS else not fusible.is_fusible(u) for u in node.users)


def _full_sources(node: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Full-size tensors that are no fusible nodes, from which `node` is computed."""
    total = cluster.rows * cluster.cols
    found: set[fx.Node] = set()
    stack, seen = [node], {node}
    while stack:
        n = stack.pop()
        if n not in levels or not fusible.is_fusible(n):
            if is_tensor(n) and same(fusible.elements(n), total):
                found.add(n)
            continue
        fresh = [i for i in n.all_input_nodes if i not in seen]
        seen.update(fresh)
        stack += fresh
    return found


def _bytes(node: fx.Node) -> int:
    """Bytes an element."""
    return value(node).dtype.itemsize


def _is_needed(node: fx.Node, builder: Builder, sinks: set[fx.Node]) -> bool:
    """Whether somebody outside of all regions reads a node that this region computes on its way, and no other region
    stores."""
    if not is_tensor(node) or node.target in fusible.LAYOUTS or node in sinks:
        return False
    return _read_outside(node, builder.interior | sinks)


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(
        user not in inside or (user.target in fusible.LAYOUTS and _read_outside(user, inside)) for user in node.users
    )


def _outside(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Users of `node` that are not computed by regions, or are views which such a one reads."""
    return [
        user
        for user in node.users
        if user not in inside or (user.target in fusible.LAYOUTS and _read_outside(user, inside))
    ]


# ---- stores ---------------------------------------------------------------------------------------------------------


def _sink(builder: Builder, node: fx.Node) -> Sink:
    """The store of a cluster's own sink."""
    if node.target is ops.quantize:
        return _payload(builder, node)
    if _is_value(node):
        return _stored(builder, node)
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if fusible.is_col_sum(node):
        i = builder.op("col_sum", builder.evaluate(source, builder.everything))
        return Sink(node, Store(0, i), Buffer(("row_programs0", builder.cols), "float32"))
    if node.args[1] == "tensor":
        if source.target is ops.amax:
            stats = builder.stat_access(source.args[0], CastLayout.of(source))  # type: ignore[arg-type]
            i = builder.op("all_amax", builder.evaluate(source, stats))
        else:
            i = builder.op("all_amax", builder.evaluate(source, builder.everything))
        return Sink(node, Store(0, i), Buffer(("programs0",), "float32"))
    i = builder.op("col_amax", builder.evaluate(source, builder.everything))
    return Sink(node, Store(0, i), Buffer(("row_programs0", builder.cols), "float32"))


def _payload(builder: Builder, node: fx.Node) -> Sink:
    source, scale, fmt = node.args[:3]
    layout = CastLayout.of(node)
    x = builder.evaluate(source, builder.everything)  # type: ignore[arg-type]
    where = builder.stat_access(source, layout)  # type: ignore[arg-type]
    s = builder.evaluate(scale, where)  # type: ignore[arg-type]
    i = builder.op("quantize", x, s, params=(fmt,))
    rows, cols = builder.number(builder.rows), builder.cols
    across, down = layout.col_multiple, layout.row_multiple
    if layout.transpose:
        across, down = down, across
    padded_rows = (rows, down) if down > 1 else rows
    padded_cols = -(-cols // across) * across
    if layout.transpose:
        lead = _padded(builder, down)
        store, shape = Store(0, i, lead, 0, True, down, across), (padded_cols, padded_rows)
    else:
        store, shape = Store(0, i, padded_cols, 0, False, down, across), (padded_rows, padded_cols)
    return Sink(node, store, Buffer(shape, str(value(node).dtype).removeprefix("torch.")))


def _padded(builder: Builder, multiple: int) -> Any:
    """Rows rounded up, as a size that the kernel is given."""
    rows = builder.rows if multiple == 1 else -(-builder.rows // multiple) * multiple
    return builder.number(rows)


def _stored(builder: Builder, node: fx.Node) -> Sink:
    """The store of a value on the way that others need."""
    x = value(node)
    buffer = Buffer(tuple(map(builder.number, x.shape)), str(x.dtype).removeprefix("torch."))
    if not all(same(a, b) or same(n, 1) for a, b, n in zip(x.stride(), contiguous(x.shape), x.shape, strict=True)):
        raise RefusedError("its strides are not row-major")
    if node.target in (ops.amax, ops.scale):
        return _statistic(builder, node)
    total = fusible.elements(node)
    if same(total, builder.rows * builder.cols):
        i = builder.evaluate(node, builder.everything)
        return Sink(node, Store(0, i, builder.cols), buffer)
    if same(total, builder.rows):
        i = builder.evaluate(node, builder.each_row)
        return Sink(node, Store(0, i), buffer)
    raise RefusedError("it is neither of the region's size nor of its rows")


def _statistic(builder: Builder, node: fx.Node) -> Sink:
    """The store of an amax or a scale, in the shape that its marker has."""
    marker = node
    while marker.target is ops.scale:
        marker = marker.all_input_nodes[0]
    if value(node).dim() == 0:
        i = builder.evaluate(node, ())
        return Sink(node, Store(0, i), Buffer((), "float32"))
    if marker.target is not ops.amax:
        raise RefusedError("the scale of something else")
    layout = CastLayout.of(marker)
    i = builder.evaluate(node, builder.stat_access(marker.args[0], layout))  # type: ignore[arg-type]
    kind, size = layout.granularity.kind, layout.granularity.size
    rows, cols = builder.number(builder.rows), builder.cols
    if kind == "row":
        if layout.transpose:
            raise RefusedError("a scale of columns")
        down = layout.row_multiple
        return Sink(node, Store(0, i, 1, 0, False, down), Buffer(((rows, down) if down > 1 else rows, 1), "float32"))
    if not isinstance(rows, int) or (layout.row_multiple, layout.col_multiple) != (1, 1):
        raise RefusedError("scales of groups with padding or symbolic rows")
    groups = cols // size
    if kind == "group" and not layout.transpose:
        return Sink(node, Store(0, i, groups), Buffer((rows, groups), "float32"))
    if kind == "group":
        return Sink(node, Store(0, i, rows // size, 0, True), Buffer((cols, rows // size), "float32"))
    if layout.transpose:
        return Sink(node, Store(0, i, rows // size, 0, True), Buffer((groups, rows // size), "float32"))
    return Sink(node, Store(0, i, groups), Buffer((rows // size, groups), "float32"))


def _origins(builder: Builder) -> tuple[str, ...]:
    """The user's lines that the region's nodes come from, most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for node in _nodes(builder):
        line = source_line(node)
        if line:
            counts[line] += 1
    return tuple(sorted(counts, key=lambda line: (-counts[line], line))[:MAX_ORIGINS])


def _nodes(builder: Builder) -> Iterable[fx.Node]:
    return (*builder.interior, *(s.node for s in builder.sinks))
