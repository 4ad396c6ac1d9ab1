"""Attention's inputs, as its fused kernels want them: on Dynamo's graph, before AOTAutograd picks the kernel.

Before      %mask = …expand(-1, 1, s, s)  strides (0, s, 1, 0)    After    %m = narrow(%mask, 0, 0, 1).contiguous()
            %o = scaled_dot_product_attention(%q, %k, %v, %mask)           %o = scaled_dot_product_attention(…, %m)

torch's fused kernels refuse a query, key, value or (on a GPU) a mask whose last dimension is not contiguous: all scores
are then computed in FP32, stored, and kept for backward. The mask that transformers makes for attention in both
directions is of that kind, expanded along the keys; and so are queries that were images. A copy costs less than that;
of a mask that hides nothing (`passes/attention/attention_masks.py`) nothing is left of it.

Sound because values stay what they are: a batch or a head of which a mask holds one copy is broadcast by attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fp8compile.passes.core.stages import DynamoGraph

INPUTS = ("query", "key", "value", "attn_mask")
MASK = INPUTS.index("attn_mask")


def run(c: DynamoGraph) -> None:
    """Copy what fused kernels refuse, in a graph and in those that it calls."""
    for module in c.gm.modules():
        if isinstance(module, fx.GraphModule):
            calls = [n for n in module.graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
            if sum(_make_ready(node) for node in calls):
                module.recompile()


def _make_ready(node: fx.Node) -> bool:
    """Return True if one of the inputs of an attention had to be copied."""
    ready = False
    for i, name in enumerate(INPUTS):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        x = given.meta.get("example_value") if isinstance(given, fx.Node) else None
        if not isinstance(given, fx.Node) or not isinstance(x, Tensor) or not _is_refused(x):
            continue
        copy = _copied(node, given, x, once=i == MASK)
        if i < len(node.args):
            node.update_arg(i, copy)
        else:
            node.update_kwarg(name, copy)
        ready = True
    return ready


def _is_refused(x: Tensor) -> bool:
    """Return True if the last dimension of `x` is not contiguous; a symbolic stride is not, whatever it will be."""
    return not x.is_nested and x.dim() > 0 and not (_is(1, x.stride(-1)) or _is(1, x.shape[-1]))


def _copied(node: fx.Node, given: fx.Node, x: Tensor, once: bool) -> fx.Node:
    """Return a contiguous copy of `given`, in front of `node`; `once`: of what is expanded over batches and heads,
    one."""
    with node.graph.inserting_before(node):
        for dim in range(x.dim() - 2) if once else ():
            if _is(0, x.stride(dim)):
                given = _called(node, "narrow", given, dim, 0, 1)
        return _called(node, "contiguous", given)


def _called(node: fx.Node, method: str, *args: Any) -> fx.Node:
    """Return a call of a method, by the line that called `node`."""
    made = node.graph.call_method(method, args)
    made.meta = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
    return made


def _is(number: int, size: Any) -> bool:
    """Return True if a size or stride is this number, and no symbol."""
    return isinstance(size, int) and size == number
