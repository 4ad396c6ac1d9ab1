"""Clusters: which sinks become one region.

    sinks       payloads, column sums, amaxes over all rows, and values that what is no region reads
    level       how many borders (matmuls, attention, …) and reductions over all rows lie before a node (`borders`)

Sinks of one level and one iteration space that read a tensor in common are one cluster. A transposed payload of a lower
level waits for the next cluster that loads the same tensors (`cluster_loads`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.core.iteration import divides, product, same
from fp8compile.passes.core.marker_views import cast_marker
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.walk import walk
from fp8compile.passes.regions.cast_layout import CastLayout
from fp8compile.passes.regions.fusion_barriers import is_narrowed_elsewhere, is_read_by_border, is_statistic
from fp8compile.passes.regions.repeated_values import is_repeated

LONGEST_HELD = (
    16384  # columns: a norm's; log-softmax's backward of 30522 took 4.0 ms, and 1.5 in Inductor's two kernels
)


@dataclass
class Cluster:
    """Sinks that shall be computed together, over rows × cols."""

    rows: Any
    cols: int
    level: int
    transposed: bool
    sinks: list[fx.Node]
    reads: set[fx.Node] = field(default_factory=set)  # full-size tensors and values that its sinks are made of


def find_clusters(graph: fx.Graph, levels: dict[fx.Node, int], reasons: list[str]) -> list[Cluster]:
    """Return the clusters of `graph` that are worth a kernel. `reasons` gets why casts are in none."""
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


def values_for_groups(graph: fx.Graph, levels: dict[fx.Node, int]) -> list[Cluster]:
    """Return clusters of one value each, which casts of groups read and nothing else."""
    casts = graph.find_nodes(op="call_function", target=ops.grouped_cast)
    sources = dict.fromkeys(first_input(cast) for cast in casts)
    values = [x for x in sources if is_value(x) and all(user.target is ops.grouped_cast for user in x.users)]
    return [k for x in values if (k := _single(x, levels, [])) is not None]


def _single(node: fx.Node, levels: dict[fx.Node, int], reasons: list[str]) -> Cluster | None:
    """Return the cluster of this one sink; None if it is none, or of a kind that no region takes."""
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
    """Return why no region runs over a tensor of this shape for the sink `node`; "" if one can."""
    cols = shape[-1]
    if not isinstance(cols, int):
        return "its rows have a symbolic length"
    if any(isinstance(n, int) and n == 0 for n in shape):
        return "it is empty"
    if any(isinstance(n, torch.SymInt) and not n.node.has_hint() for n in shape):
        return "it has a size that only the data knows"
    if fusible.is_global_amax(node) and cast_marker(node).granularity == "row":
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
    """Return the tensor that a sink runs over; None if `node` is no sink."""
    if node.target is ops.quantize or fusible.is_col_sum(node):
        return first_input(node)
    if fusible.is_global_amax(node):
        source = first_input(node)
        if source.target is ops.amax and CastLayout.of(source).granularity.kind != "tensor":
            return first_input(source) if not fusible.is_global_amax(source) else None
        return source
    return None


def is_value(node: fx.Node) -> bool:
    """Return True if `node` is something that must be stored, because what reads it is no part of a region; or should
    be, because it would be computed again and again."""
    if not is_tensor(node) or node.target in fusible.LAYOUTS or not fusible.is_pointwise(node):
        return False
    if is_narrowed_elsewhere(node):
        return False
    if value(node).dim() == 0 or value(node).dtype not in fusible.FLOATS:
        return False
    return is_read_by_border(node) or is_repeated(node)


def _reads(cluster: Cluster, levels: dict[fx.Node, int]) -> set[fx.Node]:
    """Return full-size nodes that the sinks are made of, down to the first ones of a lower level."""
    total = cluster.rows * cluster.cols

    def is_whole(node: fx.Node) -> bool:
        return is_tensor(node) and same(fusible.elements(node), total)

    def goes_on(node: fx.Node) -> bool:
        return is_tensor(node) and fusible.is_fusible(node) and (levels[node] == cluster.level or is_whole(node))

    starts = [i for sink in cluster.sinks for i in (sink, *sink.all_input_nodes)]
    return {node for node in walk(starts, through=goes_on) if is_whole(node)}


def _connected(clusters: list[Cluster]) -> list[Cluster]:
    """Return clusters joined where they read something in common."""
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
            absorb(first, k)
    return list(groups.values())


def absorb(a: Cluster, b: Cluster) -> None:
    """Give `a` all that is in `b`."""
    a.sinks += b.sinks
    a.reads |= b.reads
    a.transposed |= b.transposed
    a.level = max(a.level, b.level)


def reduces_rows(cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Return True if a statistic of rows must be computed before a sink of this cluster."""

    def is_own(node: fx.Node) -> bool:
        return levels.get(node, -1) >= cluster.level and fusible.is_fusible(node)

    starts = [i for sink in cluster.sinks for i in sink.all_input_nodes]
    return any(is_own(node) and is_statistic(node) for node in walk(starts, through=is_own))


def _is_worth_a_kernel(cluster: Cluster, levels: dict[fx.Node, int]) -> bool:
    """Return True for casts, and for column sums next to reductions of rows that are not too long: of a norm, say."""
    if any(s.target in ops.CASTS for s in cluster.sinks):
        return True
    held = cluster.cols <= LONGEST_HELD
    return held and reduces_rows(cluster, levels) and any(fusible.is_col_sum(s) for s in cluster.sinks)
