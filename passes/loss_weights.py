"""Take the incoming gradient of a loss apart: one number for backward, and weights of rows that forward knows.

    %g = where(%mask, div(%tangent, %count), 0)      →      %tangent  ·  where(%mask, 1 / %count, 0)

What a loss makes of the log-probabilities of rows is linear; so the gradient of each is the incoming number times what
can be read off the graph, if all of that is known in forward. The weights are the same nodes with 1 for the number, in
FP32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fp8compile.passes import fusible
from fp8compile.passes.compilation import Compilation, aten, is_tensor, reshape, value
from fp8compile.passes.dropped_rows import constant, is_zero
from fp8compile.passes.loss_parts import NotFoundError

LAYOUTS = (fusible.RESHAPES | {aten.expand.default}) - {aten.clone.default}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}


@dataclass(frozen=True)
class Split:
    """The number that backward is given, and the nodes that make the gradients of rows from it, in order."""

    number: fx.Node
    path: tuple[fx.Node, ...]


def split(g: fx.Node, backward: set[fx.Node], losses: set[fx.Node]) -> Split:
    """Find the number in `g`. losses: what is computed from log-probabilities. Raises `NotFoundError`."""
    path: list[fx.Node] = []
    node = g
    while (source := _source(node, backward)) is not None:
        known = [i for i in node.all_input_nodes if i is not source]
        if any(i in losses for i in known):
            raise NotFoundError("how much a row counts depends on its logits")
        path.append(node)
        node = source
    if str(value(node).numel()) != "1":
        raise NotFoundError("the losses of all rows are returned: how much each counts is not known in forward")
    return Split(node, tuple(reversed(path)))


def _source(node: fx.Node, backward: set[fx.Node]) -> fx.Node | None:
    """The one input of `node` that comes from backward, where `node` is linear in it; None at the end."""
    sources = [i for i in node.all_input_nodes if i in backward]
    if len(sources) != 1 or not is_tensor(sources[0]):
        return None
    (source,) = sources
    if node.target in LAYOUTS or node.target in fusible.CONVERSIONS or node.target is aten.neg.default:
        return source
    if node.target in PRODUCTS and node.args.count(source) == 1:
        return source
    if node.target in QUOTIENTS:
        return source if node.args[0] is source else None
    if node.target is aten.where.self and any(is_zero(a) for a in node.args[1:] if a is not source):
        return source
    return None


def emit_weights(c: Compilation, parts: Split, like: fx.Node) -> fx.Node:
    """The nodes of `parts` once more, FP32, with 1 for the number: FP32 [rows]."""
    replaced, new = parts.number, constant(c, list(value(parts.number).shape), 1.0, torch.float32, like)
    for node in parts.path:
        given = [new if a is replaced else a for a in node.args]
        if node.target is aten.where.self:
            zero = constant(c, [], 0.0, torch.float32, like)
            given = [given[0], *(a if a is new else zero for a in given[1:])]
        replaced = node
        if node.target not in fusible.CONVERSIONS:
            new = c.emit(node.target, *given, like=like)  # type: ignore[arg-type]
    return reshape(c, new, [-1], like)
