"""Clusters: which sinks become one region, and what that region loads.

    sinks       payloads, column sums, amaxes over all rows, and values that what is no region reads
    level       how many borders (matmuls, attention, …) and reductions over all rows lie before a node
    frontier    nodes of lower levels that a cluster's own nodes read: loaded if that is cheaper, else computed again

Sinks of one level and one iteration space that read a tensor in common are one cluster. A transposed payload of a lower
level waits for the next cluster that loads the same tensors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes import fusible
from fp8compile.passes.build_region import CastLayout
from fp8compile.passes.compilation import VIEWS, depends_on, is_tensor, value
from fp8compile.passes.iteration import divides, product, same
from fp8compile.passes.repeated_values import is_repeated


@dataclass
class Cluster:
    """Sinks that shall be computed together, over rows × cols."""

    rows: Any
    cols: int
    level: int
    transposed: bool
    sinks: list[fx.Node]
    reads: set[fx.Node] = field(default_factory=set)  # full-size tensors and values that its sinks are made of


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


def find_clusters(graph: fx.Graph, levels: dict[fx.Node, int], reasons: list[str]) -> list[Cluster]:
    """The clusters of `graph` that are worth a kernel. `reasons` gets why casts are in none."""
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
        plain = [k for k in group if not reduces_rows(k, levels)]
        joined += _connected(plain) + [k for k in group if k not in plain]
    casts = any(s.target in ops.CASTS for k in joined for s in k.sinks)
    return [k for k in joined if _is_worth_a_kernel(k, levels) or (casts and any(map(is_repeated, k.sinks)))]


def _single(node: fx.Node, levels: dict[fx.Node, int], reasons: list[str]) -> Cluster | None:
    """The cluster of this one sink; None if it is none, or of a kind that no region takes."""
    source = _source(node)
    if source is None and is_value(node):
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


def is_value(node: fx.Node) -> bool:
    """Whether `node` is something that must be stored, because what reads it is no part of a region; or should be,
    because it would be computed again and again."""
    if not is_tensor(node) or node.target in fusible.LAYOUTS or not fusible.is_pointwise(node):
        return False
    if _is_narrowed_elsewhere(node):
        return False
    if value(node).dim() == 0 or value(node).dtype not in fusible.FLOATS:
        return False
    return _is_read_by_border(node) or is_repeated(node)


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


def reduces_rows(cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
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
    if any(s.target in ops.CASTS for s in cluster.sinks):
        return True
    return reduces_rows(cluster, levels) and any(fusible.is_col_sum(s) for s in cluster.sinks)


def delayed(graph: fx.Graph, clusters: list[Cluster], levels: dict[fx.Node, int]) -> list[Cluster]:
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


# ---- what a cluster loads -------------------------------------------------------------------------------------------


def leaves_of(cluster: Cluster, levels: dict[fx.Node, int]) -> Any:
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
        return node in dear or _is_narrowed_elsewhere(node) or (node not in cluster.sinks and is_repeated(node))

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
