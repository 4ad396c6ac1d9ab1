"""Skip overflow: a step of which a gradient overflowed writes nothing, and nobody has to wait to know.

Before      %g = fp8.unscale(%grad, %inverse, %overflow)      copy_(%step, %next)
            fp8.add_in_place([%step, %step'], 1, None)
After       the same                                          copy_(%step, where(eq(%overflow, 0), %next, %step))
            fp8.add_in_place([%step, %step'], 1, %overflow)

For what `merge_updates` left: numbers such as step counts, and updates that could not be merged. A merged update reads
`overflow` itself (`Update.skip`). Sound because all that a step keeps, it keeps by copies to its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten, update_value, value
from fp8compile.passes.core.node_views import Copy
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer.state_views import Unscale


def overflow_of(graph: fx.Graph) -> fx.Node | None:
    """Return the number that says whether this step is to be skipped, where gradients are unscaled."""
    return next(
        (Unscale(node).overflow for node in graph.find_nodes(op="call_function", target=state_ops.unscale)), None
    )


def run(c: OptimizerGraph) -> None:
    """Let every `copy_` to an input write what was there where `overflow` is not 0, and nothing be counted."""
    graph, overflow = c.graph, c.overflow
    for node in graph.find_nodes(op="call_function", target=state_ops.add_in_place):
        node.update_arg(2, overflow)
    keeps: dict[torch.device, fx.Node] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written, new = Copy(copy).written, Copy(copy).source
        if overflow is None or written.op != "placeholder":
            continue
        with graph.inserting_before(copy):
            device = value(written).device
            if device not in keeps:
                with graph.inserting_after(overflow):
                    keeps[device] = _on(graph, overflow, device)
            chosen = _call(graph, aten.where.self, keeps[device], new, written)
        copy.update_arg(1, chosen)


def _on(graph: fx.Graph, overflow: fx.Node, device: torch.device) -> fx.Node:
    """Return True if the step counts, on `device`."""
    with graph.inserting_before(overflow.next):
        kept = _call(graph, aten.eq.Scalar, overflow, 0)
    if value(overflow).device == device:
        return kept
    with graph.inserting_before(kept.next):
        return _call(graph, torch.ops.prims.device_put.default, kept, device)


def _call(graph: fx.Graph, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    update_value(node)
    return node
