"""Open states: what an optimizer's graph reads and writes are the parts of an 8-bit state, not the state.

Before      %p = %s.dequantize()                    %s.store(%p)
After       %p = load_state(%payload, %side, …)     %q = store_state(%p, …);  %payload.copy_(%q[0]);  %side.copy_(%q[1])

AOTAutograd can take a tensor subclass apart by itself; but then it traces the graph once more, and takes every state
apart again at every step. It works on Dynamo's graph, after `hoist_state_load_store`. States that meet anything else
stay closed.
"""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import fx
from torch.fx.node import Argument

from fp8compile.optimizer import state_ops
from fp8compile.optimizer.state_parts import INNER
from fp8compile.optimizer.states import FP8State
from fp8compile.passes.core.stages import DynamoGraph


def run(c: DynamoGraph) -> None:
    """Let the graph read and write parts of states; note of which state and which of its parts each new buffer is."""
    gm, nodes = c.gm, defaultdict(list)
    for node in gm.graph.find_nodes(op="get_attr"):
        nodes[str(node.target)].append(node)
    for name, reads in nodes.items():
        state = gm._buffers.get(name)
        if isinstance(state, FP8State) and all(_opens(user) for node in reads for user in node.users):
            parts = [part for part in INNER if getattr(state, part) is not None]
            for part in parts:
                gm.register_buffer(f"{name}_{part}", getattr(state, part))
                c.opened[f"{name}_{part}"] = name, part
            for node in reads:
                _open(gm.graph, node, state, parts)
            del gm._buffers[name]
    gm.graph.lint()
    gm.recompile()


def _opens(user: fx.Node) -> bool:
    return user.op == "call_method" and user.target in ("dequantize", "store") and not user.kwargs


def _open(graph: fx.Graph, node: fx.Node, state: FP8State, names: list[str]) -> None:
    with graph.inserting_before(node):
        parts = {part: graph.get_attr(f"{node.target}_{part}") for part in names}
    for user in list(node.users):
        with graph.inserting_before(user):
            if user.target == "dequantize":
                new = graph.call_function(
                    state_ops.load_state, (parts["payload"], parts["side"], state.format, state.dtype)
                )
                user.replace_all_uses_with(new)
            else:
                _store(graph, user.args[1], parts, state)
        graph.erase_node(user)
    graph.erase_node(node)


def _store(graph: fx.Graph, x: Argument, parts: dict[str, fx.Node], state: FP8State) -> None:
    """Store as `FP8State.store` does of a contiguous `x` in its own dtype."""
    how = (parts.get("counter"), parts.get("low"), state.format, state.parameter)
    stored = graph.call_function(state_ops.store_state, (x, *how))
    for n, part in enumerate(("payload", "side")):
        graph.call_method("copy_", (parts[part], graph.call_function(operator.getitem, (stored, n))))
    if "counter" in parts:
        graph.call_method("add_", (parts["counter"], 1))
