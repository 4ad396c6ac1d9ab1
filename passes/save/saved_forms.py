"""Saved forms: in which form each value of the forward half would be kept for backward, and why.

    itself              parameters, indices, masks, statistics, what is small, returned, sensitive, only for the loss
    a payload at hand   of a cast that a forward matmul reads, if each row or group of it has its own scale
    e4m3 group(g)       a payload made for it, with scales of groups of g along the feature dimension

Decides nothing about what is saved: that is the cut's (`passes/save/min_cut.py`), which takes the bytes from here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import E4M3
from fp8compile.options import Options
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import VIEWS, aten, base, divides, hint, is_tensor, value
from fp8compile.passes.core.origin import module_path
from fp8compile.passes.save.rounding_hazards import QUERY_OR_KEY

GROUPS = (128, 64, 32, 16)
SCALE_BYTES = 4
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
NOTHING_IN_FP8 = "no matmul of this graph is in FP8, so nothing is rounded (option save would round it)"
REORDERED = {*VIEWS, aten.clone.default} - {aten.expand.default, aten.slice.Tensor, aten.select.int}


@dataclass(frozen=True)
class Form:
    """How a value is kept, and why: as it is, or, with a granularity, as FP8.

    bytes: what that takes, scales included. payload, scale: the nodes of a cast at hand. path: views from the value to
    the matrix that is cast; empty where the value is cast in its own shape. merged: how many of the innermost
    dimensions are one for the groups: all pixels of a channel.
    """

    reason: str
    bytes: int
    granularity: str | None = None
    payload: fx.Node | None = None
    scale: fx.Node | None = None
    path: tuple[fx.Node, ...] = ()
    merged: int = 1

    def name(self, x: torch.Tensor) -> str:
        """As a plan writes it."""
        return dtype_name(x) if self.granularity is None else f"{E4M3.name} {self.granularity}"


def as_it_is(x: torch.Tensor, reason: str) -> Form:
    """The form of a value that keeps its precision."""
    return Form(reason, count(x.shape) * x.dtype.itemsize)


def dtype_name(x: torch.Tensor) -> str:
    """The dtype of `x` without its module."""
    return str(x.dtype).removeprefix("torch.")


def count(shape: Iterable[Any]) -> int:
    """Elements of a tensor of this shape; symbolic sizes as they were seen when it was traced."""
    return math.prod(map(hint, shape))


@dataclass(frozen=True)
class Graph:
    """What decides about forms beside the values themselves."""

    outputs: set[fx.Node]  # what the forward half returns to the user
    held: set[fx.Node]  # inputs that somebody else keeps: parameters, data without gradients
    forward: set[fx.Node]  # what the forward half computes for its results
    in_fp8: bool = True  # whether a matmul is: else only what `save` names is rounded


def find_forms(graph: fx.Graph, known: Graph, options: Options, sensitive: dict[fx.Node, str]) -> dict[fx.Node, Form]:
    """The form of every floating-point tensor of the forward half. `sensitive`: what must not be rounded, and why."""
    feeding = _feeding_matmuls(graph, known.forward)
    returned = {base(n) for n in known.outputs} | known.outputs
    forms: dict[fx.Node, Form] = {}
    for node in graph.nodes:
        if node not in known.forward or node.target in ops.CASTS or not is_tensor(node):
            continue
        if not value(node).is_floating_point():
            continue
        why_not = (
            _policy(node, options)
            or ("an input that others hold" if node in known.held else "")
            or ("returned by the model" if node in returned else "")
            or ("a by-product of attention" if _is_by_product(node) else "")
            or ("random numbers" if is_random(node) else "")
            or _sensitive(node, sensitive, options)
            or ("" if node in feeding else "no matmul reads it: it is for the loss")
            or _of_source(node, forms)
            or _unfit(node, options.save_min_bytes)
            or ("" if known.in_fp8 or _is_named(node, options) else NOTHING_IN_FP8)
        )
        forms[node] = as_it_is(value(node), why_not) if why_not else _as_fp8(node, known.forward)
    return forms


def _sensitive(node: fx.Node, sensitive: dict[fx.Node, str], options: Options) -> str:
    why = sensitive.get(node, "")
    with_qk = why == QUERY_OR_KEY and options.saves(module_path(made_at(node)))[1] == "fp8_with_qk"
    return "" if with_qk else why


def _of_source(node: fx.Node, forms: dict[fx.Node, Form]) -> str:
    """Why what `node` is a view or a conversion of keeps its precision: then this is no way around it."""
    if node.op != "call_function" or not (node.target in REORDERED or node.target in fusible.CONVERSIONS):
        return ""
    form = forms.get(node.all_input_nodes[0])
    return form.reason if form is not None and form.granularity is None and not form.reason.startswith("rows") else ""


def _as_fp8(node: fx.Node, forward: set[fx.Node]) -> Form:
    """The cheapest FP8 form: the payload of a forward matmul, or one in groups."""
    path: tuple[fx.Node, ...] = ()
    for path, cast in _casts(node, forward):
        if _is_fine(cast):
            scale: fx.Node = cast.args[1]  # type: ignore[assignment]
            size = count(value(cast).shape) + SCALE_BYTES * count(value(scale).shape)
            return Form("a matmul of forward reads it", size, str(cast.args[3]), cast, scale, path)
    x = value(path[-1] if path else node)
    group, merged = _group(x) if path else _group_of(node)
    assert group is not None
    n = count(x.shape)
    return Form("an activation", n + SCALE_BYTES * (n // group), f"group({group})", path=path, merged=merged)


def _is_fine(cast: fx.Node) -> bool:
    """Whether a cast scales each row or group by itself, in the tensor's own layout, without padding."""
    _, _, fmt, granularity, *layout = cast.args
    fine = granularity == "row" or str(granularity).startswith("group")
    return fine and fmt == E4M3.name and not any(layout[:1]) and set(layout[1:]) <= {1}


def _casts(node: fx.Node, forward: set[fx.Node]) -> Iterator[tuple[tuple[fx.Node, ...], fx.Node]]:
    """The forward casts of all of `node` as a matrix, each with the views that lead there.

    A payload made over the same rows and columns as such a cast can be made by the same kernel.
    """
    stack: list[tuple[fx.Node, ...]] = [(node,)]
    size, seen = count(value(node).shape), {node}
    while stack:
        path = stack.pop()
        x = value(path[-1])
        for user in path[-1].users:
            if user in seen or not is_tensor(user) or user not in forward:
                continue
            if user.target is ops.quantize and user.args[0] is path[-1] and x.dim() == 2 and _group(x)[0] is not None:
                yield path[1:], user
            elif user.target in REORDERED and count(value(user).shape) == size:
                seen.add(user)
                stack.append((*path, user))


def made_at(node: fx.Node) -> fx.Node:
    """The node that computed the values of `node`, which may be a view, a copy or a conversion of it."""
    while node.op == "call_function" and (node.target in REORDERED or node.target in fusible.CONVERSIONS):
        node = node.all_input_nodes[0]
    return node


def memory_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of `node`, of which it may be a slice."""
    while True:
        node = base(node)
        if node.target is not operator.getitem or node.args[0].target not in SPLITS:  # type: ignore[union-attr]
            return node
        node = node.all_input_nodes[0].all_input_nodes[0]


def _policy(node: fx.Node, options: Options) -> str:
    pattern, form = options.saves(module_path(made_at(node)))
    return f"save={{{pattern!r}: 'bf16'}}" if form == "bf16" else ""


def _is_named(node: fx.Node, options: Options) -> bool:
    """Whether option `save` says how `node` is kept, not its default."""
    return options.saves(module_path(made_at(node)))[0] != ""


def _unfit(node: fx.Node, least: int) -> str:
    x = value(node)
    if x.dtype not in fusible.FLOATS:
        return f"{dtype_name(x)} has no FP8 form"
    if x.dim() < 2:
        return "a vector" if x.dim() else "a number"
    if count(x.shape) * x.dtype.itemsize < least:
        return f"smaller than {least} bytes"
    if _group_of(node)[0] is None:
        return f"rows of {x.shape[dense_order(x)[-1]]} are no multiple of {GROUPS[-1]}"
    return ""


def dense_order(x: torch.Tensor) -> list[int]:
    """The dimensions of `x` as they lie in memory, outermost first; in their own order where some are repeated."""
    strides = [hint(s) for s in x.stride()]
    if 0 in strides:
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def _group(x: torch.Tensor, merged: int = 1) -> tuple[int | None, int]:
    """The largest group that divides the innermost dimension (the features), or the product of several."""
    length: Any = 1
    for d in dense_order(x)[-merged:]:
        length = length * x.shape[d]
    return next((g for g in GROUPS if divides(g, length)), None), merged


def _group_of(node: fx.Node) -> tuple[int | None, int]:
    """The group of `node`. Where its rows are pixels, those of one channel may make groups together."""
    x = value(node)
    found = _group(x)
    order = dense_order(x)
    if found[0] is None and _is_image(node) and x.permute(order).is_contiguous() and order[:2] == [0, 1]:
        return _group(x, x.dim() - 2)
    return found


def _is_image(node: fx.Node) -> bool:
    """Whether a convolution makes `node` or reads it: [batch, channels, *pixels]."""
    near = [made_at(node), *node.users]
    return value(node).dim() >= 3 and any(operators.is_convolution(n.target) for n in near)


def _is_by_product(node: fx.Node) -> bool:
    """Whether `node` is a statistic that an attention returns beside its output: exact, and small."""
    return node.target is operator.getitem and operators.is_attention(node.args[0].target) and node.args[1] != 0  # type: ignore[union-attr]


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers. Attention does where it drops some of its weights."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if operators.is_attention(node.target):
        return bool(operators.arguments(node).get("dropout_p", 0.0) != 0.0)
    return node.target in fusible.RANDOM or torch.Tag.nondeterministic_seeded in node.target.tags


def _feeding_matmuls(graph: fx.Graph, forward: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the forward half that a matmul, a convolution or attention is computed from."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in forward and any(u in found or fusible.is_library_kernel(u) for u in node.users if u in forward):
            found.add(node)
    return found
