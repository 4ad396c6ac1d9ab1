"""Spread scalars: a learning rate that changes becomes an input of the graph, in every form an optimizer writes it.

Before      param.add_(grad, alpha=rate)      param.addcdiv_(m, root, value=rate)     fma(quotient, rate, param)
After       param.add_(mul(grad, rate))       param.add_(mul(div(m, root), rate))     add(param, mul(quotient, rate))

It works on Dynamo's graph, where a rate that has changed once is a symbolic number. AOTAutograd makes a tensor of such
a number where it is a factor; as `alpha` or `value` it would make it a constant, and compile again at every change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

SCALED = {"add": "alpha", "add_": "alpha", "sub": "alpha", "sub_": "alpha"}
SCALED |= {"addcdiv": "value", "addcdiv_": "value", "addcmul": "value", "addcmul_": "value"}


def run(gm: fx.GraphModule) -> None:
    """Rewrite Dynamo's graph in place."""
    for node in list(gm.graph.nodes):
        if node.op in ("call_method", "call_function"):
            _spread(gm.graph, node)
    gm.graph.lint()
    gm.recompile()


def _spread(graph: fx.Graph, node: fx.Node) -> None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target is torch.ops.prims.fma.default and any(map(_is_symbol, node.args)):
        a, b, c = node.args
        with graph.inserting_before(node):
            node.target, node.args = torch.add, (c, graph.call_function(torch.mul, (a, b)))
    elif name in SCALED and _is_symbol(scale := node.kwargs.get(SCALED[name])):
        x, first, *second = node.args
        with graph.inserting_before(node):
            for other in second:
                first = graph.call_function(torch.mul if "mul" in name else torch.div, (first, other))
            node.args = (x, graph.call_function(torch.mul, (first, scale)))
        node.kwargs = {}
        short = name.removesuffix("_")
        if short.startswith("addc"):
            target = "add_" if name.endswith("_") else "add"
            node.target = target if node.op == "call_method" else getattr(torch.Tensor, target)


def _is_symbol(x: Any) -> bool:
    if not isinstance(x, fx.Node):
        return False
    return isinstance(x.meta.get("example_value"), torch.SymFloat)
