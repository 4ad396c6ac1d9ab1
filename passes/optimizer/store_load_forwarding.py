"""Forward states: an optimizer reads the states that it has just computed, not what was stored of them.

Before      %p, %s = fp8.store_state(%x, …);  %m = fp8.load_state(%p, %s, …)
After       %m = %x

An in-place operation on an `FP8State` stores it, and the next one loads it: of a chain only the last store stays. Sound
because a store changes no value but by rounding, and it is the method: the update uses unquantized new states (COAT,
arXiv 2410.19313, §4), rounding reaches only the next step.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import remove_dead, value
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer.state_views import LoadState, StoreState


def run(c: OptimizerGraph) -> None:
    """Replace every load of what a store of this graph made by what was stored."""
    graph = c.graph
    for node in list(graph.find_nodes(op="call_function", target=state_ops.load_state)):
        store = stored_by(LoadState(node).payload)
        if store is not None and store == stored_by(LoadState(node).side):
            node.replace_all_uses_with(_in_dtype(graph, store.x, node))
            graph.erase_node(node)
    remove_dead(graph)


def stored_by(node: fx.Node) -> StoreState | None:
    """Return the store that made this payload or side data; None if none has."""
    item = Getitem.of(node)
    return StoreState.of(item.source) if item else None


def _in_dtype(graph: fx.Graph, x: fx.Node, load: fx.Node) -> fx.Node:
    """Return `x` in the dtype of `load`, converted by the operator that decomposed graphs have."""
    if value(x).dtype == value(load).dtype:
        return x
    with graph.inserting_before(load):
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (x, value(load).dtype))
    node.meta = dict(load.meta)
    return node
