"""Spread scalars: a rate, or a beta, that changes becomes an input of the graph, in every form an optimizer writes it.

Before      %r = lr.item()                        param.add_(grad, alpha=-%r)    param.addcdiv_(m, root, value=-%r)
After       %r = lr.item();  %t = mul(ones(), %r) param.add_(mul(grad, -%t))     param.add_(mul(div(m, root), -%t))
            m.lerp_(grad, %r)                     m.add_(mul(sub(grad, m), %t))

It works on Dynamo's graph, where a number that may change is one taken out of a tensor. AOTAutograd makes
tensors of the numbers that are plain factors, and constants of all others, which compiles again at every change; here
all arithmetic is that of one tensor, of the same 64 bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.stages import DynamoGraph

SCALED = {"add": "alpha", "add_": "alpha", "sub": "alpha", "sub_": "alpha"}
OPERANDS = {"add": ("input", "other", "alpha"), "sub": ("input", "other", "alpha"), "lerp": ("input", "end", "weight")}
OPERANDS |= dict.fromkeys(("addcdiv", "addcmul"), ("input", "tensor1", "tensor2", "value"))
SCALED |= {"addcdiv": "value", "addcdiv_": "value", "addcmul": "value", "addcmul_": "value"}
ARITHMETIC = {"add", "sub", "mul", "truediv", "div", "neg", "pow", "add_", "sub_", "mul_", "div_", "rsub"}
ARITHMETIC |= {"iadd", "isub", "imul", "itruediv"}


def run(c: DynamoGraph) -> None:
    """Make tensors of the numbers that may change."""
    gm = c.gm
    for node in list(gm.graph.nodes):
        if node.op in ("call_method", "call_function"):
            _spread(gm.graph, node)
    for node in list(gm.graph.find_nodes(op="call_method", target="item")):
        if _may_be_tensor(node):
            _make_tensor(gm.graph, node)
    gm.graph.lint()
    gm.recompile()


def _make_tensor(graph: fx.Graph, number: fx.Node) -> None:
    """Use 1 · number instead of `number`: the one form of which AOTAutograd makes a tensor in every version."""
    with graph.inserting_after(number):
        one = graph.call_function(torch.ones, ((),), {"dtype": torch.float64})
    with graph.inserting_after(one):
        tensor = graph.call_function(torch.mul, (one, number))
    number.replace_all_uses_with(tensor, delete_user_cb=lambda user: user is not tensor)


def _spread(graph: fx.Graph, node: fx.Node) -> None:
    """Make a factor of a number that is `alpha`, `value`, a lerp's weight or one of an fma's."""
    name = _name(node)
    if node.target is torch.ops.prims.fma.default and any(map(_is_symbol, node.args)):
        a, b, c = node.args
        with graph.inserting_before(node):
            node.target, node.args = torch.add, (c, graph.call_function(torch.mul, (a, b)))
    elif name in SCALED and _is_symbol(node.kwargs.get(SCALED[name])):
        if (given := _operands(node, OPERANDS[name.rstrip("_")])) is None:
            return  # which is compiled again when the number changes
        x, first, *second, scale = given
        with graph.inserting_before(node):
            for other in second:
                first = graph.call_function(torch.mul if "mul" in name else torch.div, (first, other))
            node.args = (x, graph.call_function(torch.mul, (first, scale)))
        node.kwargs = {}
        if name.startswith("addc"):
            _add_instead(node, name)
    elif name in ("lerp", "lerp_") and (given := _operands(node, OPERANDS["lerp"])) and _is_symbol(given[2]):
        x, end, weight = given
        with graph.inserting_before(node):
            way = graph.call_function(torch.mul, (graph.call_function(torch.sub, (end, x)), weight))
        node.args, node.kwargs = (x, way), {}
        _add_instead(node, name)


def _operands(node: fx.Node, names: tuple[str, ...]) -> list[Any] | None:
    """Return the arguments of `node`, by place or by name; None where there are others, or fewer."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given[name] for name in names] if given.keys() == set(names) else None


def _add_instead(node: fx.Node, name: str) -> None:
    """Let `node` add, in place where it has worked in place."""
    target = "add_" if name.endswith("_") else "add"
    node.target = target if node.op == "call_method" else getattr(torch.Tensor, target)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_symbol(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("example_value"), torch.SymFloat)


def _may_be_tensor(number: fx.Node) -> bool:
    """Return True if everything that is computed from `number`, up to the first tensors, is arithmetic that tensors
    have."""
    for user in number.users:
        if _name(user) not in ARITHMETIC or user.kwargs or user.target is operator.ipow:
            return False
        if _is_symbol(user) and not _may_be_tensor(user):
            return False
    return isinstance(number.meta.get("example_value"), torch.SymFloat)
