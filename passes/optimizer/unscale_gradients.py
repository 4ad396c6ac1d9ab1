"""Unscale gradients: a step reads gradients times 1/scale, two numbers of the optimizer's saying which and whether.

Before      %m.lerp_(%grad, 0.1)
After       %g = fp8.unscale(%grad, %inverse, %overflow)      %m.lerp_(%g, 0.1)

On Dynamo's graph, where gradients are still inputs by identity. `passes/optimizer/skip_overflow.py` makes the step one
that writes nothing where `overflow` is not 0; what is unscaled is never written back to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.stages import DynamoGraph

NAMES = ("fp8_inverse_scale", "fp8_overflow")


def run(c: DynamoGraph) -> None:
    """Unscale the gradients that are read, and note the names of the buffers that the graph has now."""
    assert c.unscaling is not None
    gm = c.gm
    read = [n for n in _tensors(gm, c.inputs, c.unscaling.gradients) if n.users]
    inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    if not read:
        return
    for node in reversed(inputs):  # all inputs first, then what is computed of them
        if node is not (first := next(iter(gm.graph.nodes))):
            first.prepend(node)
    for name, x in zip(NAMES, c.unscaling.numbers, strict=True):
        gm.register_buffer(name, x)
    with gm.graph.inserting_after(inputs[-1]):
        overflow = gm.graph.get_attr(NAMES[1])
    with gm.graph.inserting_after(inputs[-1]):
        inverse = gm.graph.get_attr(NAMES[0])
    for gradient in read:
        with gm.graph.inserting_after(overflow):
            new = gm.graph.call_function(state_ops.unscale, (gradient, inverse, overflow))
        new.meta["example_value"] = gradient.meta.get("example_value")
        gradient.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    gm.graph.lint()
    gm.recompile()
    c.added += NAMES


def _tensors(gm: fx.GraphModule, example_inputs: Sequence[Any], ids: frozenset[int]) -> list[fx.Node]:
    """Return the inputs of the graph that are one of `ids`."""
    placeholders = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False)
    attributes = ((n, getattr(gm, str(n.target), None)) for n in gm.graph.find_nodes(op="get_attr"))
    return [n for n, x in (*placeholders, *attributes) if isinstance(x, torch.Tensor) and id(x) in ids]
