"""Save as FP8: what the cut keeps in groups becomes payload and scales, and backward computes from these.

Before      %x ─► forward                       saved: %x
            %x ─► mul, … ─► backward            (computed again from %x)
After       %x ─► forward                       saved: %q, %s
            %x ─► amax, scale, quantize ─► %q, %s ─► dequantize ─► mul', … ─► backward

The joint graph has one node for what both halves compute, so what backward computes again from a rounded value gets
nodes of its own (mul'), and forward's stay as they were. torch then cuts the graph at %q and %s. The order of backward
puts each dequantize at its first use; there a region pulls it in and reads the payload.

A slice that keeps its precision is copied where little else of its memory is kept: saved as it is, it would keep alive
the whole that it is a view of.

Sound because the values are the same in shape and dtype, their layout in memory is kept, and nothing random is among
the nodes that are doubled: a dropout that ran again under another name would draw other numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import E4M3
from fp8compile.passes.core.aten_views import Permutation
from fp8compile.passes.core.compilation import Compilation, aten, is_tensor, update_value, value
from fp8compile.passes.core.replace import copied, restride
from fp8compile.passes.core.scale_groups import dense_order
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.core.stride_demands import is_demanded
from fp8compile.passes.core.walk import inputs_of, walk
from fp8compile.passes.save.min_cut import Halves, run_again
from fp8compile.passes.save.saved_forms import Form, bytes_of, is_random, memory_of
from fp8compile.passes.save.saved_value import SavedValue
from fp8compile.plan.overrides import SavedKey
from fp8compile.plan.reasons import Reason, Why

READ_BY_RANDOM = Why(Reason.RANDOM, "a random operator that runs again is computed from it")


@dataclass
class Cut(Compilation):
    """A joint graph of which it is decided what the forward half keeps for the backward half.

    saved: the values that are kept; halves: what is known of both halves; sizes: the symbolic ones that are kept, with
    those that values need which are kept as FP8.
    """

    halves: Halves = field(kw_only=True)
    saved: Sequence[SavedValue] = field(kw_only=True)
    sizes: list[fx.Node] = field(default_factory=list, kw_only=True)
    stage: Stage = field(default=Stage.CUT, kw_only=True)

    @property
    def kept(self) -> list[fx.Node]:
        """The nodes that are saved, a payload being followed by its scales."""
        return list(dict.fromkeys(node for one in self.saved for node in one.kept))  # one scale may serve two values


def run(c: Cut) -> None:
    """Round the values that are kept in FP8, and note which nodes are saved for each."""
    save_as_fp8(c, c.saved, c.halves)


def save_as_fp8(c: Cut, saved: Sequence[SavedValue], halves: Halves) -> None:
    """Edit the joint graph, and fill in the nodes that are saved for each value: itself, or a payload and its scales.

    Casts are measured with option `watch`.
    """
    again = run_again(c.graph, (*(s.node for s in saved), *c.sizes), halves)
    random = _read_by_random(c.graph, (s.node for s in saved), again)
    for one in saved:
        if one.node in random:
            one.keep_as_it_is(READ_BY_RANDOM)
    wasteful = _wasteful_slices([s.node for s in saved if not s.form.is_fp8], 8 * c.options.save_min_bytes)
    rounded: dict[fx.Node, fx.Node] = {}
    for one in saved:
        node = one.node
        if one.form.is_fp8:
            payload, scale, rounded[node] = _round(c, node, one.form, one.key if c.options.watch is not None else None)
            one.kept = (payload, scale)
            continue
        if node in wasteful:
            rounded[node] = copied(c, node, value(node).stride(), node.next)
        one.kept = (rounded.get(node, node),)
    _compute_from(c, rounded, again, halves)


def _wasteful_slices(kept: list[fx.Node], least: int) -> set[fx.Node]:
    """Return what would be kept as a view of memory of which more than a tenth, and `least` bytes, is not kept; but not
    what must lie as it does: the rows of a bias were filled up for attention."""
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in kept:
        if is_tensor(node):
            views.setdefault(memory_of(node), []).append(node)
    found: set[fx.Node] = set()
    for whole, parts in views.items():
        if whole in parts or whole.op != "call_function" or not is_tensor(whole):
            continue
        used, size = (sum(bytes_of(value(n)) for n in nodes) for nodes in (parts, [whole]))
        if size - used > max(size // 10, least):
            found.update(n for n in parts if not is_demanded(n))
    return found


def _round(c: Cut, node: fx.Node, form: Form, key: SavedKey | None) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return payload and scales of `node`, and its value made of them; `key`: they are measured, under this key."""
    assert form.granularity is not None
    x, order = value(node), dense_order(value(node))
    source = form.path[-1] if form.path else node
    place: Any = max(source, form.payload or source, form.scale or source).next
    while place.op == "placeholder":
        place = place.next

    def emit(target: Any, *args: Any) -> fx.Node:
        return c.emit(target, *args, like=node, before=place)

    moved = form.payload is None and not form.path and order != sorted(order)
    if moved:  # features are what lies side by side in memory; a payload at hand is of rows as they are
        source = emit(aten.permute.default, node, order)
    if form.merged > 1:
        inner = math.prod(value(source).shape[-form.merged :])
        source = emit(aten.view.default, source, [*(_size(c, n) for n in value(source).shape[: -form.merged]), inner])
    payload, scale = form.payload, form.scale
    if payload is None or scale is None:
        scale = emit(ops.scale, emit(ops.amax, source, form.granularity), E4M3.name)
        payload = emit(ops.quantize, source, scale, E4M3.name, form.granularity)
    if key is not None:
        scale = _watched(c, source, scale, form, key, emit)
    back = emit(ops.dequantize, payload, scale, form.granularity, x.dtype)
    if form.merged > 1:
        back = emit(aten.view.default, back, [_size(c, x.shape[d]) for d in order])
    if moved:
        back = emit(aten.permute.default, back, [order.index(d) for d in range(x.dim())])
    for view, of in reversed(list(zip(form.path, (node, *form.path), strict=False))):
        back = _undone(c, view, of, back, emit)
    return payload, scale, back


def _watched(
    c: Compilation, source: fx.Node, scale: fx.Node, form: Form, key: SavedKey, emit: Callable[..., fx.Node]
) -> fx.Node:
    """Return the scale behind an operator that measures the cast; rows and groups lie along the features."""
    path, *rest, occurrence = key
    cast, operand = f"{E4M3.name} {form.granularity}", (path, "saved", occurrence, json.dumps(rest))
    return emit(ops.observe, scale, [source], cast, False, c.options.watch, json.dumps([cast, [operand]]))


def _undone(c: Cut, view: fx.Node, of: fx.Node, back: fx.Node, emit: Callable[..., fx.Node]) -> fx.Node:
    """Return a node with the value of `of`; `back` has that of `view`, which is a view or a copy of `of`."""
    if view.target is aten.permute.default:
        dims = Permutation(view).dims
        return emit(aten.permute.default, back, [dims.index(d) for d in range(len(dims))])
    if view.target in (aten.t.default, aten.transpose.int):
        return emit(view.target, back, *view.args[1:])
    if same_sizes(value(of).shape, value(back).shape):
        return back
    shape = [_size(c, n) for n in value(of).shape]
    try:
        return emit(aten.view.default, back, shape)
    except (RuntimeError, ValueError):  # a view that cannot be: fake tensors raise either
        return emit(aten.reshape.default, back, shape)


def _size(c: Cut, size: Any) -> Any:
    """Return a size as an argument: a number, or the node that computes it, of sizes that backward is given."""
    if isinstance(size, int):
        return size
    nodes = [n for n in c.graph.nodes if str(n.meta.get("val")) == str(size)]
    found = next((n for n in nodes if n in c.sizes), nodes[0])  # several inputs may have one size
    computed_from = (n for n in walk([found], inputs_of) if isinstance(n.meta.get("val"), torch.SymInt))
    c.sizes += [n for n in computed_from if n.op == "placeholder" and n not in c.sizes]
    return found


def _compute_from(c: Compilation, rounded: dict[fx.Node, fx.Node], again: set[fx.Node], halves: Halves) -> None:
    """Let backward compute from the rounded values: double what it computes again from them."""
    backward = halves.backward - halves.inputs
    instead = dict(rounded)
    for node in list(c.graph.nodes):
        if node not in again or not any(i in instead for i in node.all_input_nodes):
            continue
        last: fx.Node = max(node, *(instead.get(i, i) for i in node.all_input_nodes))
        with c.graph.inserting_after(last):
            double = c.graph.node_copy(node, lambda n: instead.get(n, n))
        instead[node] = _valued(c, double)
    for node, other in instead.items():
        users = sorted(u for u in node.users if u in backward)
        for user in users:
            user.replace_input_with(node, other)
        if isinstance(value(node), torch.Tensor) and not same_sizes(value(node).stride(), value(other).stride()):
            restride(c, other, value(node).stride(), users)


def _valued(c: Compilation, double: fx.Node) -> fx.Node:
    """Return the node with its value; a view that other strides do not allow is taken of a copy."""
    try:
        update_value(double)
    except (RuntimeError, ValueError):  # fake tensors raise either
        source = double.all_input_nodes[0]
        double.replace_input_with(
            source, c.emit(aten.clone.default, source, like=source, before=double, contiguous=True)
        )
        update_value(double)
    return double


def _read_by_random(graph: fx.Graph, saved: Iterable[fx.Node], again: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of `saved` that a random operator that runs again is computed from."""
    candidates, found = {*saved, *again}, set()
    for node in reversed(list(graph.nodes)):
        if node in candidates and any(u in again and (u in found or _may_draw(u)) for u in node.users):
            found.add(node)
    return found


def _may_draw(node: fx.Node) -> bool:
    return is_random(node) or isinstance(node.target, torch._ops.HigherOrderOperator)  # which may hold anything
