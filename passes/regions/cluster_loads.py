"""What the region of a cluster loads, and what waits for a region that loads the same.

frontier    nodes of lower levels that a cluster's own nodes read: loaded if that is cheaper, else computed again
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp8compile import ops
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import depends_on, is_tensor
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.walk import walk
from fp8compile.passes.regions.clusters import Cluster, absorb, values_for_groups
from fp8compile.passes.regions.fusion_barriers import (
    element_bytes,
    is_narrowed_elsewhere,
    is_read_by_border,
    is_statistic,
)
from fp8compile.passes.regions.repeated_values import is_repeated


def leaves_of(cluster: Cluster, levels: dict[fx.Node, int]) -> Callable[[fx.Node], bool]:
    """Return which fusible nodes the cluster's region loads: column results, statistics where its stores are transposed
    or from a lower level, and what is cheaper to load than to compute again."""
    frontier = _frontier(cluster, levels)
    dear = _dear(cluster, frontier, levels)

    def is_leaf(node: fx.Node) -> bool:
        if node not in levels or fusible.is_col_sum(node) or fusible.is_global_amax(node):
            return True  # not in levels: made of a region's results
        lower = levels[node] < cluster.level
        statistic = is_statistic(node) or fusible.is_moment(node)
        if statistic and (cluster.transposed or (lower and not _shares_level(node, cluster, levels))):
            return True
        return node in dear or is_narrowed_elsewhere(node) or (node not in cluster.sinks and is_repeated(node))

    return is_leaf


def _shares_level(node: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Return True if a sink of the cluster stands on the node's own level (it was delayed)."""
    return any(levels[s] == levels[node] for s in cluster.sinks)


def _frontier(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Return full-size fusible nodes of lower levels that nodes of the cluster's own levels read."""
    own = {levels[s] for s in cluster.sinks}
    total = cluster.rows * cluster.cols

    def fusible_inputs(node: fx.Node) -> list[fx.Node]:
        return [i for i in node.all_input_nodes if i in levels and fusible.is_fusible(i)]

    def is_beyond(node: fx.Node) -> bool:
        if levels[node] in own or not is_tensor(node) or node.target in fusible.LAYOUTS:
            return False
        return same(fusible.elements(node), total)

    reached = walk(cluster.sinks, fusible_inputs, through=lambda node: not is_beyond(node))
    return {node for node in reached if is_beyond(node)}


def _dear(cluster: Cluster, frontier: set[fx.Node], levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the part of the frontier that is loaded: recomputing it would read more than storing and loading it moves.

    What lies in memory in any case, because a border reads it, is loaded unless it is a mere copy of something.
    """
    sources = {node: _full_sources(node, cluster, levels) for node in frontier}
    in_memory = {n for n in frontier if is_read_by_border(n)}
    dear = {n for n in in_memory if len(sources[n]) > 1 or element_bytes(n) <= sum(map(element_bytes, sources[n]))}
    for group in _sharing(frontier - dear, sources):
        alone = _dear_alone(group, sources)
        rest = group - alone
        dear |= alone
        if _reading(rest, sources) >= sum(2 * element_bytes(n) for n in rest):
            dear |= rest
    return dear


def _dear_alone(group: set[fx.Node], sources: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return the nodes that save more than they cost even if the others are computed again: a gradient that was added
    up over layers, beside the activation of this one."""
    rest = set(group)
    while True:
        reading = _reading(rest, sources)
        gains = {n: reading - _reading(rest - {n}, sources) - 2 * element_bytes(n) for n in sorted(rest)}
        best = max(gains, key=lambda n: gains[n], default=None)
        if best is None or gains[best] <= 0:
            return group - rest
        rest.remove(best)


def _reading(nodes: set[fx.Node], sources: dict[fx.Node, set[fx.Node]]) -> int:
    """Return the bytes for each element that computing all of `nodes` reads."""
    return sum(map(element_bytes, {s for n in nodes for s in sources[n]}))


def _sharing(nodes: set[fx.Node], sources: dict[fx.Node, set[fx.Node]]) -> list[set[fx.Node]]:
    """Return the nodes in groups that are computed from the same tensors."""
    groups: list[tuple[set[fx.Node], set[fx.Node]]] = []
    for node in nodes:
        members, reads = {node}, set(sources[node])
        for group in [g for g in groups if g[1] & reads]:
            groups.remove(group)
            members, reads = members | group[0], reads | group[1]
        groups.append((members, reads))
    return [members for members, _ in groups]


def _full_sources(node: fx.Node, cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Return full-size tensors that are no fusible nodes, from which `node` is computed."""
    total = cluster.rows * cluster.cols

    def is_computed(n: fx.Node) -> bool:
        return n in levels and fusible.is_fusible(n)

    reached = [n for n in walk([node], through=is_computed) if not is_computed(n)]
    return {n for n in reached if is_tensor(n) and same(fusible.elements(n), total)}


def delayed(graph: fx.Graph, clusters: list[Cluster], levels: dict[fx.Node, int]) -> list[Cluster]:
    """Let a transposed payload of a lower level wait for the next region that loads the same tensors anyway; so, too,
    a value that only casts of groups read, and that would take a kernel of its own."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    loads = {id(k): _loads(k, levels) for k in clusters if k.transposed}
    kept: list[Cluster] = []
    for k in sorted(clusters, key=lambda k: -k.level):
        hosts = [h for h in reversed(kept) if h.level > k.level and _can_wait(k, h, loads, order)]
        if hosts:
            absorb(hosts[0], k)
        else:
            kept.append(k)
    stored = {sink for k in kept for sink in k.sinks}
    for k in values_for_groups(graph, levels):
        if not stored.isdisjoint(k.sinks):
            continue
        later = sorted((h for h in kept if h.level > k.level), key=lambda h: h.level)
        host = next((h for h in later if _can_store(h, k, levels, order)), None)
        if host is not None:
            absorb(host, k)
    return kept


def _can_store(host: Cluster, k: Cluster, levels: dict[fx.Node, int], order: dict[fx.Node, int]) -> bool:
    """Return True if the region of `host` loads all that the value of `k` is made of, and nothing made of it."""
    if host.transposed or str(k.rows) != str(host.rows) or k.cols != host.cols:
        return False
    if not _loads(k, levels) <= _loads(host, levels):
        return False
    return not depends_on([i for s in host.sinks for i in s.all_input_nodes], set(k.sinks), order)


def _can_wait(k: Cluster, host: Cluster, loads: dict[int, set[fx.Node]], order: dict[fx.Node, int]) -> bool:
    if not (k.transposed and host.transposed and str(k.rows) == str(host.rows) and k.cols == host.cols):
        return False
    if not loads[id(k)] & loads[id(host)] or any(s.target is not ops.quantize for s in k.sinks):
        return False
    return not depends_on([i for s in host.sinks for i in s.all_input_nodes], set(k.sinks), order)


def _loads(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the full-size tensors that a region of this cluster loads."""
    frontier = _frontier(cluster, levels)
    dear = _dear(cluster, frontier, levels)
    own = {i for n in cluster.reads if levels[n] == cluster.level for i in (n, *n.all_input_nodes)}
    direct = {n for n in own if not fusible.is_fusible(n)}
    return direct | dear | {s for n in frontier - dear for s in _full_sources(n, cluster, levels)}
