"""Forward states: an optimizer reads the states that it has just computed, not what was stored of them.

Before      %p, %s = fp8.store_state(%x, …);  %m = fp8.load_state(%p, %s, …)
After       %m = %x

An in-place operation on an `FP8State` stores it, and the next one loads it: of a chain only the last store stays. Sound
because a store changes no value but by rounding, and it is the method: the update uses unquantized new states (COAT,
arXiv 2410.19313, §4), rounding reaches only the next step.
"""

from __future__ import annotations

import operator

from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import remove_dead, value
from fp8compile.passes.core.stages import OptimizerGraph


def run(c: OptimizerGraph) -> None:
    """Replace every load of what a store of this graph made by what was stored."""
    graph = c.graph
    for node in list(graph.find_nodes(op="call_function", target=state_ops.load_state)):
        store = stored_by(node.args[0])
        if store is not None and store is stored_by(node.args[1]):
            node.replace_all_uses_with(_in_dtype(graph, store.args[0], node))
            graph.erase_node(node)
    remove_dead(graph)


def stored_by(node: object) -> fx.Node | None:
    """The store that made this payload or side data."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is state_ops.store_state:
            return source
    return None


def _in_dtype(graph: fx.Graph, x: object, load: fx.Node) -> fx.Node:
    from torch._prims import convert_element_type  # the form that decomposed graphs have

    assert isinstance(x, fx.Node)
    if value(x).dtype == value(load).dtype:
        return x
    with graph.inserting_before(load):
        node = graph.call_function(convert_element_type.default, (x, value(load).dtype))  # type: ignore[attr-defined]
    node.meta = dict(load.meta)
    return node
