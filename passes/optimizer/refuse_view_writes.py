"""Refuse view writes: a step that writes to a part of an 8-bit state is an error, not a lost write.

    m.view(-1)[:100].zero_()        m[0] = x            refused
    m.lerp_(grad, 0.1)              m.T @ p             fine

A view of an `FP8State` is computed from its values, so what is written to it would not reach the state. On Dynamo's
graph views and in-place operations still have their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.errors import StateError
from fp8compile.optimizer.states import FP8State
from fp8compile.passes.core.stages import DynamoGraph

# Functions and attributes that are no operators, or views under another name, and so have no schema to ask.
VIEWS = {
    "view",
    "reshape",
    "ravel",
    "getitem",
    "getattr",
    "T",
    "mT",
    "H",
    "mH",
    "unflatten",
    "hsplit",
    "vsplit",
    "dsplit",
}
COPIES = {"to", "contiguous"}  # views by their schemas, of what is right already; others are copies that may be written

WRITES = {"setitem", "iadd", "isub", "imul", "itruediv", "ipow"}


def run(c: DynamoGraph) -> None:
    """Raise `StateError` naming the line that writes to a view of a state."""
    gm = c.gm
    is_view: dict[fx.Node, bool] = {}  # of what is, or may be, memory of a state
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            if _is_state(getattr(gm, str(node.target), None)):
                is_view[node] = False
        elif node.op == "placeholder":
            if isinstance(node.meta.get("example_value"), FP8State):
                is_view[node] = False
        elif node.args and isinstance(source := node.args[0], fx.Node) and source in is_view:
            _follow(node, source, is_view)


def _follow(node: fx.Node, source: fx.Node, is_view: dict[fx.Node, bool]) -> None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").partition(".")[0]
    writes = name in WRITES or (name.endswith("_") and not name.endswith("__"))
    if writes and (is_view[source] or name == "setitem"):
        where = str(node.meta.get("stack_trace", "")).strip().splitlines()[-2:]
        raise StateError(
            f"this step writes to a part of an optimizer state that is kept in 8 bits ({name}: {' '.join(where)}). "
            "Compute the whole state and write it at once, or keep it plain: "
            'options={"states": {"smallest": N}} with an N above its number of elements'
        )
    if writes:
        is_view[node] = False
    elif name in VIEWS or _returns_view(name):
        is_view[node] = True


def _returns_view(name: str) -> bool:
    """Return True if an operator of this name returns a part of what it is given, by its schema."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    return name not in COPIES and any(getattr(packet, each).is_view for each in overloads)


def _is_state(x: Any) -> bool:
    return isinstance(getattr(x, "_local_tensor", x), FP8State)
