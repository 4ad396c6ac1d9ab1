"""Weights: what is computed from parameters (and buffers and constants) alone.

A parameter, its cast, its transpose, its normalised form, the sum of it and a low-rank product. Two weights have no
role: their product keeps the precision of weights. What else has been through a matmul is no weight: attention to
learned queries is attention.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.core.compilation import CASTS_ARE_KEPT, Compilation, aten, is_tensor, value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.walk import walk
from fp8compile.passes.matmul.find_matmuls import MATMULS

SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def weight_nodes(c: Compilation) -> set[fx.Node]:
    """Return the nodes computed from a parameter, and beside it from parameters, buffers and constants alone."""
    known = {n: x for n in c.graph.find_nodes(op="placeholder") if (x := c.inputs.get(n.name)) is not None}
    static = _computed_of({n: x.is_parameter for n, x in known.items() if x.is_parameter or x.is_buffer}, c.graph)
    return {node for node, has_parameter in static.items() if has_parameter}


def frozen_nodes(c: Compilation) -> set[fx.Node]:
    """Return the nodes computed from weights alone whose casts are kept: of frozen ones none in training, where those
    that backward reads are not; none where scales have a history."""
    if (c.is_training and not c.options.keep_casts) or c.options.recipe.is_delayed:
        return set()
    frozen = {n: True for n in c.graph.find_nodes(op="placeholder") if n.meta.get(CASTS_ARE_KEPT)}
    return {node for node, is_frozen in _computed_of(frozen, c.graph).items() if is_frozen}


def _computed_of(inputs: dict[fx.Node, bool], graph: fx.Graph) -> dict[fx.Node, bool]:
    """Return inputs and what is computed of them and of constants alone: True if one that is True takes part."""
    static = dict(inputs)
    for node in graph.nodes:
        if node.op in ("get_attr", "call_function"):
            tensors = [i for i in node.all_input_nodes if not isinstance(i.meta.get("val"), SIZES)]
            if all(i in static for i in tensors):
                static[node] = any(static[i] for i in tensors)
    return static


def is_weight(operand: fx.Node | None, weights: set[fx.Node]) -> bool:
    """Return True if a matmul takes `operand` for its weight."""
    return operand is not None and operand in weights and (not _has_matmul(operand) or _is_updated_weight(operand))


def _is_updated_weight(node: fx.Node) -> bool:
    """Return True if `node` is a weight plus something of its shape that matmuls made, as a low-rank update is.

    Such a sum may be scaled, also by a number for each row, as by a magnitude over a norm (DoRA).
    """
    while (scaled := _scaled(node)) is not None:
        node = scaled
    if not is_tensor(node) or node.target is not aten.add.Tensor:  # is_tensor: of several outputs none is a sum
        return False
    terms = [i for i in node.all_input_nodes if _has_shape_of(i, node)]
    return len(terms) == 2 and any(not _has_matmul(term) or _is_updated_weight(term) for term in terms)


def _scaled(node: fx.Node) -> fx.Node | None:
    """Return what `node` computes element by element, with nothing or with fewer numbers beside it; None for others."""
    inputs = node.all_input_nodes
    if len(inputs) == 1:
        return inputs[0]
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        whole = [i for i in inputs if _has_shape_of(i, node)]
        return whole[0] if len(whole) == 1 else None
    return None


def _has_shape_of(x: fx.Node, other: fx.Node) -> bool:
    return is_tensor(x) and is_tensor(other) and same_sizes(value(x).shape, value(other).shape)


def _has_matmul(node: fx.Node) -> bool:
    """Return True if a matmul takes part in what `node` computes; asked of weights only, whose history is short."""
    return any(step.target in MATMULS for step in walk([node]))
