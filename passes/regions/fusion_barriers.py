"""Borders of regions: what no kernel reaches across, and which values lie in memory because of it.

border      a matmul, attention, a sort: anything that no region computes
level       how many borders and reductions over all rows lie before a node
"""

from __future__ import annotations

from torch import fx

from fp8compile import ops
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import VIEWS, is_tensor, value
from fp8compile.passes.core.marker_views import Amax


def find_levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node the number of borders and reductions over all rows on the longest path before it."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        levels[node] = max((levels[i] + _is_barrier(i) for i in node.all_input_nodes), default=0)
    return levels


def _is_barrier(node: fx.Node) -> bool:
    """Return True if what reads `node` cannot be in one kernel with what `node` reads."""
    if node.op != "call_function":
        return False
    if fusible.is_global_amax(node) or fusible.is_col_sum(node) or node.target is ops.quantize:
        return True
    if fusible.is_fusible(node):
        return False
    views = node.target in VIEWS or not is_tensor(node) or "getitem" in str(node.target)
    return not (views and all(not fusible.is_fusible(i) for i in node.all_input_nodes))


def is_statistic(node: fx.Node) -> bool:
    """Return True if `node` is a reduction along rows."""
    if fusible.is_row_reduction(node):
        return True
    amax = Amax.of(node)
    return amax is not None and amax.granularity == "row" and not fusible.is_global_amax(node)


def is_read_by_border(node: fx.Node) -> bool:
    """Return True if something that is no part of a region reads `node`, or a view of it."""
    return any(not fusible.is_fusible(u) or (u.target in fusible.LAYOUTS and is_read_by_border(u)) for u in node.users)


def is_narrowed_elsewhere(node: fx.Node) -> bool:
    """Return True if `node` is a conversion to fewer bytes that Inductor can do as it writes the value: then we read
    fewer."""
    if node.target not in fusible.CONVERSIONS:
        return False
    source = node.all_input_nodes[0]
    while source.target in fusible.LAYOUTS:
        source = source.all_input_nodes[0]
    if source.op != "call_function":
        return False
    narrower = element_bytes(node) < element_bytes(source)
    return narrower and not fusible.is_fusible(source) and not fusible.is_opaque(source)


def element_bytes(node: fx.Node) -> int:
    """Return the bytes of one element."""
    return value(node).dtype.itemsize
