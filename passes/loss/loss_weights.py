"""How much each term of each row counts, for the gradients that `fp8::chunked_loss` computes.

    %g = where(%mask, div(%tangent, %count), 0)      →      %tangent  ·  where(%mask, 1 / %count, 0)

What a loss makes of the terms of rows is mostly linear; then the gradient of each is the incoming number times what can
be read off the graph, if all of that is known in forward. The weights are the same nodes with 1 for the number, in FP32
throughout. Else they are what backward computes.

FP16: weights are brought to WIDEST first, for a mean over many rows would make subnormals of gradients that a loss
scale, which comes later, cannot bring back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fp8compile.kernels.loss.softmax_step import TERMS
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import Compilation, aten, dependents, is_tensor, reshape, value
from fp8compile.passes.core.node_views import call_of
from fp8compile.passes.loss.dropped_rows import constant, with_dropped
from fp8compile.passes.loss.find_loss import Found
from fp8compile.passes.loss.loss_parts import NotFoundError

LAYOUTS = (fusible.RESHAPES | {aten.expand.default}) - {aten.clone.default}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}


WIDEST = 1024.0  # times the largest slope of a softmax, 1, well inside of FP16's 65504
LARGEST_NORMALISER = 64.0  # that is reckoned with; 4096 would still fit
prims = torch.ops.prims


@dataclass(frozen=True)
class Weights:
    """values: FP32 [rows], or [len(TERMS), rows]. number: FP32 [], which multiplies the gradients made of them."""

    values: fx.Node
    number: fx.Node | None


def known_in_forward(c: Compilation, found: Found, backward: set[fx.Node]) -> Weights:
    """Return the weights with 1 for the incoming number. Raises `NotFoundError` where they are not known in forward."""
    like, losses = found.labelled, dependents(c.graph, [found.head.node])
    parts = {g: split(g, backward, losses) for g in found.cotangents}
    numbers = {p.number for p in parts.values()}
    if len(numbers) != 1:
        raise NotFoundError("what comes back to its rows are several numbers, not one")
    incoming = numbers.pop()
    number = c.emit(prims.convert_element_type.default, incoming, torch.float32, like=incoming)
    if value(number).dim():
        number = c.emit(aten.view.default, number, [], like=incoming)
    values, unit = _of_terms(c, found, [emit_weights(c, p, like) for p in parts.values()], like)
    return Weights(values, number if unit is None else c.emit(aten.mul.Tensor, number, unit, like=incoming))


def known_in_backward(c: Compilation, found: Found, like: fx.Node) -> Weights:
    """Return the weights as they come back, before `like`."""
    wide = [c.emit(prims.convert_element_type.default, g, torch.float32, like=like) for g in found.cotangents]
    return Weights(*_of_terms(c, found, [reshape(c, g, [-1], like) for g in wide], like))


def _of_terms(c: Compilation, found: Found, each: list[fx.Node], like: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the weights of terms of what comes back to rows; and for FP16 the number that they have been divided
    by."""
    if found.cut is not None:
        each = [with_dropped(c, weights, found.cut, like, 0) for weights in each]
    factors = list(zip(*found.cotangents.values(), strict=True))[: len(TERMS) if found.every_term else 1]
    terms, unit = [weighted_sum(c, [-f for f in of_term], each, like) for of_term in factors], None
    if value(found.head.node).dtype is torch.float16:
        classes, steepest = float(value(found.head.node).shape[-1]), abs(found.curve.inner * (found.curve.outer or 1.0))
        bounds = [steepest * of_term for of_term in (1.0, classes, 1.0, 2 * LARGEST_NORMALISER)]  # of their gradients
        slope = weighted_sum(c, bounds, [c.emit(aten.abs.default, term, like=like) for term in terms], like)
        least = constant(c, [1], 1e-30, torch.float32, like)  # of no rows, there is no maximum
        largest = c.emit(aten.amax.default, c.emit(aten.cat.default, [slope, least], like=like), like=like)
        unit = c.emit(aten.div.Tensor, largest, WIDEST, like=like)
        terms = [c.emit(aten.div.Tensor, term, unit, like=like) for term in terms]
    if not found.every_term:
        return terms[0], unit
    return c.emit(aten.cat.default, [c.emit(aten.unsqueeze.default, t, 0, like=like) for t in terms], like=like), unit


def weighted_sum(c: Compilation, factors: Sequence[float], terms: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    """Return Σ factors · terms, as many as there are terms."""
    taken = [(factor, term) for factor, term in zip(factors, terms, strict=False) if factor] or [(0.0, terms[0])]
    parts = [term if factor == 1 else c.emit(aten.mul.Tensor, term, factor, like=like) for factor, term in taken]
    return functools.reduce(lambda a, b: c.emit(aten.add.Tensor, a, b, like=like), parts)


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
        raise NotFoundError("how much each row counts is known only in backward")
    return Split(node, tuple(reversed(path)))


def _source(node: fx.Node, backward: set[fx.Node]) -> fx.Node | None:
    """Return the one input of `node` that comes from backward, where `node` is linear in it; None at the end."""
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
    if node.target is aten.where.self and any(fusible.is_zero(a) for a in node.args[1:] if a is not source):
        return source
    return None


def emit_weights(c: Compilation, parts: Split, like: fx.Node) -> fx.Node:
    """Return the nodes of `parts` once more, FP32, with 1 for the number: FP32 [rows]."""
    replaced, new = parts.number, constant(c, list(value(parts.number).shape), 1.0, torch.float32, like)
    for node in parts.path:
        given = [new if a is replaced else a for a in node.args]
        if node.target is aten.where.self:
            zero = constant(c, [], 0.0, torch.float32, like)
            given = [given[0], *(a if a is new else zero for a in given[1:])]
        replaced = node
        if node.target not in fusible.CONVERSIONS:
            new = c.emit(call_of(node), *given, like=like)
    return reshape(c, new, [-1], like)
