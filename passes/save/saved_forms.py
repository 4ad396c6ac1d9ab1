"""Saved forms: in which form each value of the forward half would be kept for backward, and why.

    itself              parameters, indices, masks, statistics, what is small, returned, sensitive, only for the loss
    a payload at hand   of a cast that a forward matmul reads, if each row or group of it has its own scale
    e4m3 group(g)       a payload made for it, with scales of groups of g along the feature dimension

Decides nothing about what is saved: that is the cut's (`passes/save/min_cut.py`), which takes the bytes from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import E4M3, parse_granularity
from fp8compile.options import Options
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import aten, base, is_tensor, value
from fp8compile.passes.core.marker_views import Quantize
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.origin import module_path
from fp8compile.passes.core.scale_groups import GROUPS, dense_order, group_of, group_of_tensor
from fp8compile.passes.core.sizes import count
from fp8compile.passes.save.rounding_hazards import Hazards
from fp8compile.plan.reasons import Reason, Why

SCALE_BYTES = 4
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
AT_HAND = Why(Reason.AT_HAND, "a matmul of forward reads it")
ACTIVATION = Why(Reason.ACTIVATION, "an activation")
HELD = Why(Reason.HELD, "an input that others hold")
RETURNED = Why(Reason.RETURNED, "returned by the model")
BY_PRODUCT = Why(Reason.BY_PRODUCT, "a by-product of attention")
RANDOM = Why(Reason.RANDOM, "random numbers")
FOR_LOSS = Why(Reason.FOR_LOSS, "no matmul reads it: it is for the loss")
NOTHING_IN_FP8 = Why(
    Reason.NOTHING_IN_FP8, "no matmul of this graph is in FP8, so nothing is rounded (option save would round it)"
)


@dataclass(frozen=True)
class Form:
    """The form in which a value is kept, and why: as it is, or, with a granularity, as FP8.

    bytes: what that takes, scales included. payload, scale: the nodes of a cast at hand. path: views from the value to
    the matrix that is cast; empty where the value is cast in its own shape. merged: how many of the innermost
    dimensions are one for the groups: all pixels of a channel.
    """

    why: Why
    bytes: int
    granularity: str | None = None
    payload: fx.Node | None = None
    scale: fx.Node | None = None
    path: tuple[fx.Node, ...] = ()
    merged: int = 1

    @property
    def is_fp8(self) -> bool:
        """True if it is a payload with scales."""
        return self.granularity is not None

    def name(self, x: torch.Tensor) -> str:
        """Return its name for a value of the dtype of `x`, as a plan writes it."""
        return dtype_name(x) if self.granularity is None else f"{E4M3.name} {self.granularity}"


def as_it_is(x: torch.Tensor, why: Why) -> Form:
    """Return the form of a value that keeps its precision."""
    return Form(why, bytes_of(x))


def bytes_of(x: torch.Tensor) -> int:
    """Return the bytes that `x` takes."""
    return count(x.shape) * x.dtype.itemsize


def dtype_name(x: torch.Tensor) -> str:
    """Return the dtype of `x` without its module."""
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Graph:
    """The facts that decide about forms beside the values themselves."""

    outputs: set[fx.Node]  # what the forward half returns to the user
    held: set[fx.Node]  # inputs that somebody else keeps: parameters, data without gradients
    forward: set[fx.Node]  # what the forward half computes for its results
    in_fp8: bool = True  # some matmul is: else only what `save` names is rounded


def find_forms(graph: fx.Graph, known: Graph, options: Options, hazards: Hazards) -> dict[fx.Node, Form]:
    """Return the form of every floating-point tensor of the forward half. `hazards`: what must not be rounded."""
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
            or (HELD if node in known.held else None)
            or (RETURNED if node in returned else None)
            or (BY_PRODUCT if _is_by_product(node) else None)
            or (RANDOM if is_random(node) else None)
            or _hazard(node, hazards, options)
            or (None if node in feeding else FOR_LOSS)
            or _of_source(node, forms)
            or _unfit(node, options.save_min_bytes)
            or (None if known.in_fp8 or _is_named(node, options) else NOTHING_IN_FP8)
        )
        forms[node] = as_it_is(value(node), why_not) if why_not else _as_fp8(node, known.forward)
    return forms


def _hazard(node: fx.Node, hazards: Hazards, options: Options) -> Why | None:
    why = hazards.get(node)
    if why is None or why.code not in (Reason.QUERY_OR_KEY, Reason.ATTENTION_OUTPUT):
        return why
    return None if options.saves(module_path(fusible.made_at(node)))[1] == "fp8_with_qk" else why


def _of_source(node: fx.Node, forms: dict[fx.Node, Form]) -> Why | None:
    """Return why the source of a view or a conversion keeps its precision: then `node` is no way around it."""
    if node.op != "call_function" or not (node.target in fusible.REORDERED or node.target in fusible.CONVERSIONS):
        return None
    form = forms.get(node.all_input_nodes[0])
    return None if form is None or form.is_fp8 or form.why.code == Reason.UNALIGNED else form.why


def _as_fp8(node: fx.Node, forward: set[fx.Node]) -> Form:
    """Return the cheapest FP8 form: the payload of a forward matmul, or one in groups."""
    path: tuple[fx.Node, ...] = ()
    for path, cast in _casts(node, forward):
        if _is_fine(cast):
            size = count(value(cast.node).shape) + SCALE_BYTES * count(value(cast.scale).shape)
            return Form(AT_HAND, size, cast.granularity, cast.node, cast.scale, path)
    x = value(path[-1] if path else node)
    group, merged = group_of_tensor(x) if path else group_of(node)
    assert group is not None
    n = count(x.shape)
    return Form(ACTIVATION, n + SCALE_BYTES * (n // group), f"group({group})", path=path, merged=merged)


def _is_fine(cast: Quantize) -> bool:
    """Return True if a cast scales each row or group by itself, in the tensor's own layout, without padding."""
    fine = parse_granularity(cast.granularity).kind in ("row", "group")
    return fine and cast.format == E4M3.name and not cast.transpose and set(cast.multiples) == {1}


def _casts(node: fx.Node, forward: set[fx.Node]) -> Iterator[tuple[tuple[fx.Node, ...], Quantize]]:
    """Yield the forward casts of all of `node` as a matrix, each with the views that lead there.

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
            cast = Quantize.of(user)
            if cast is not None and cast.x is path[-1] and x.dim() == 2 and group_of_tensor(x)[0] is not None:
                yield path[1:], cast
            elif user.target in fusible.REORDERED and count(value(user).shape) == size:
                seen.add(user)
                stack.append((*path, user))


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of `node`, of which it may be a slice."""
    while True:
        node = base(node)
        part = Getitem.of(node)
        if part is None or part.source.target not in SPLITS:
            return node
        node = part.source.all_input_nodes[0]


def _policy(node: fx.Node, options: Options) -> Why | None:
    pattern, form = options.saves(module_path(fusible.made_at(node)))
    return Why(Reason.OPTION, f"save={{{pattern!r}: 'bf16'}}") if form == "bf16" else None


def _is_named(node: fx.Node, options: Options) -> bool:
    """Return True if option `save` names `node`, so that its form is not the default of the option."""
    return options.saves(module_path(fusible.made_at(node)))[0] != ""


def _unfit(node: fx.Node, least: int) -> Why | None:
    x = value(node)
    if x.dtype not in fusible.FLOATS:
        return Why(Reason.DTYPE, f"{dtype_name(x)} has no FP8 form")
    if x.dim() < 2:
        return Why(Reason.VECTOR, "a vector" if x.dim() else "a number")
    if bytes_of(x) < least:
        return Why(Reason.TOO_SMALL, f"smaller than {least} bytes")
    if group_of(node)[0] is None:
        rows = x.shape[dense_order(x)[-1]]
        return Why(Reason.UNALIGNED, f"rows of {rows} are no multiple of {GROUPS[-1]}")
    return None


def _is_by_product(node: fx.Node) -> bool:
    """Return True if `node` is a statistic that an attention returns beside its output: exact, and small."""
    part = Getitem.of(node)
    return part is not None and operators.is_attention(part.source.target) and part.index != 0


def is_random(node: fx.Node) -> bool:
    """Return True if `node` draws random numbers. Attention does where it drops some of its weights."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if operators.is_attention(node.target):
        return bool(operators.arguments(node).get("dropout_p", 0.0) != 0.0)
    return node.target in fusible.RANDOM or torch.Tag.nondeterministic_seeded in node.target.tags


def _feeding_matmuls(graph: fx.Graph, forward: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the forward half that a matmul, a convolution or attention is computed from."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in forward and any(u in found or fusible.is_library_kernel(u) for u in node.users if u in forward):
            found.add(node)
    return found
