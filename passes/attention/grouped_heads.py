"""Grouped heads: attention reads keys and values as they are, where a model has repeated them for groups of queries.

Before      %e = expand(unsqueeze(%k, 2), [b, h, n, s, d])            After    %o = attention(%q, %k, %v, %mask,
            %r = reshape(%e, [b, h·n, s, d])      of values likewise                          enable_gqa=True)
            %o = attention(%q, %r, %r', %mask)

A model whose attention has a mask repeats keys and values by itself. A token that is decoded with a static cache would
copy all of that, n times as large, and read it again: with many sequences that is most of its time. In training, both
copies would be made in forward and again in backward, and their gradients added up by a kernel more; cuDNN's attention
adds them up by itself.

On Dynamo's graph, before AOTAutograd picks the kernel; only where torch picks the same kernel for both, as those that
know nothing of groups are no faster.

Sound because grouped attention means just this: query head i reads head i // n of keys and values. They are read later
than they were copied: nothing in between may write (`_writes_nothing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode  # public by its documentation; it has no other name

from fp8compile.passes.attention.attention_strides import INPUTS
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.stages import DynamoGraph

KEY, VALUE = INPUTS.index("key"), INPUTS.index("value")
HEADS = 1  # the dimension of heads, where attention reads them
REPEATS = {  # functions by the methods that they are; a custom operator may have any name
    torch.clone: "clone", torch.flatten: "flatten", torch.repeat_interleave: "repeat_interleave",
    torch.reshape: "reshape", torch.transpose: "transpose",
}  # fmt: skip
PURE_METHODS = frozenset(
    {
        "add", "bfloat16", "chunk", "clone", "contiguous", "dim", "div", "expand", "expand_as", "flatten", "float",
        "half", "masked_fill", "mul", "narrow", "neg", "permute", "repeat", "repeat_interleave", "reshape", "select",
        "size", "split", "squeeze", "sub", "to", "transpose", "tril", "triu", "type_as", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
PURE_FUNCTIONS = frozenset(
    {
        operator.add, operator.floordiv, operator.getitem, operator.mul, operator.neg, operator.sub, operator.truediv,
        torch.arange, torch.cat, torch.chunk, torch.cos, torch.neg, torch.permute, torch.sin, torch.split,
        torch.squeeze, torch.stack, torch.unbind, torch.unsqueeze, torch.where, *REPEATS,
    }
)  # fmt: skip


def run(c: DynamoGraph) -> None:
    """Give attention what was repeated as it was before, in a graph and in those that it calls."""
    for module in c.gm.modules():
        if isinstance(module, fx.GraphModule):
            calls = [n for n in module.graph.nodes if n.target is scaled_dot_product_attention]
            if any(map(_chooses_kernels, module.graph.nodes)):
                continue
            if sum(_group(node) for node in calls):
                module.recompile()  # AOTAutograd drops what nothing reads


def _chooses_kernels(node: fx.Node) -> bool:
    """Return True for what allows or forbids kernels of attention within a graph (`sdpa_kernel`)."""
    is_attention = node.target is scaled_dot_product_attention
    return node.op == "call_function" and not is_attention and "sdp" in getattr(node.target, "__name__", "")


def _group(node: fx.Node) -> bool:
    """Return True if the keys and values of an attention were repeated and are not any more."""
    if node.kwargs.get("enable_gqa"):
        return False
    repeats = [_repeat_of(_argument(node, i), HEADS) for i in (KEY, VALUE)]
    found = [repeat for repeat in repeats if repeat and _is_unwritten(repeat.first, node)]
    if len(found) != len(repeats) or len({repeat.count for repeat in found}) != 1:
        return False
    with node.graph.inserting_before(node):
        given = {i: repeat.once() for i, repeat in zip((KEY, VALUE), found, strict=True)}
    if not _is_same_kernel(node, given):
        return False
    for i, once in given.items():
        if i < len(node.args):
            node.update_arg(i, once)
        else:
            node.update_kwarg(INPUTS[i], once)
    node.update_kwarg("enable_gqa", True)
    return True


def _argument(node: fx.Node, i: int) -> Any:
    return node.args[i] if i < len(node.args) else node.kwargs.get(INPUTS[i])


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


# ---- what was repeated -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """Heads that were repeated. count: how often each; first: the node that did; once: makes a node of the heads
    before, and returns it."""

    count: int
    first: fx.Node
    once: Callable[[], fx.Node]


def _repeat_of(node: Any, heads: int) -> Repeat | None:
    """Return what `node` repeats along its dimension `heads`; None if it repeats nothing there."""
    if not isinstance(node, fx.Node) or not isinstance(x := _example(node), Tensor):
        return None
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None or not isinstance(before := _example(source), Tensor):
        return None
    name = _name(node)
    if name in ("contiguous", "clone"):
        return _repeat_of(source, heads)
    if name == "transpose" and len(node.args) == 3:
        return _of_transposed(node, source, heads)
    if name == "repeat_interleave":
        count = _count(node)
        grown = isinstance(count, int) and before.dim() == x.dim() and x.shape[heads] == before.shape[heads] * count
        is_along_heads = _dim_of(node) in (heads, heads - x.dim())
        return Repeat(count, node, lambda: source) if grown and count > 1 and is_along_heads else None
    if name in ("reshape", "view", "flatten"):
        return _of_merged(source, before, x, heads)
    return None


def _name(node: fx.Node) -> str:
    """Return the method of torch's that a node calls, by itself or as a function; "" for anything else."""
    return str(node.target) if node.op == "call_method" else REPEATS.get(node.target, "")  # type: ignore[call-overload]


def _of_transposed(node: fx.Node, source: fx.Node, heads: int) -> Repeat | None:
    dims = [dim % _example(node).dim() for dim in node.args[1:] if isinstance(dim, int)]
    if len(dims) != 2:
        return None
    repeat = _repeat_of(source, dims[1 - dims.index(heads)] if heads in dims else heads)
    return repeat and Repeat(repeat.count, repeat.first, lambda: _call(node, "transpose", repeat.once(), *dims))


def _count(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")


def _dim_of(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")


def _of_merged(source: fx.Node, before: Tensor, x: Tensor, heads: int) -> Repeat | None:
    """Return the repeat of heads [.., h, n, ..] that have become [.., h·n, ..], and were [.., h, 1, ..]."""
    while _name(source) in ("contiguous", "clone"):
        source = source.args[0]  # type: ignore[assignment]
    wide = source.args[0] if _name(source) == "expand" else None
    if not isinstance(wide, fx.Node) or not isinstance(narrow := _example(wide), Tensor):
        return None
    sizes = list(before.shape)
    if before.dim() != x.dim() + 1 or narrow.dim() != before.dim() or not _is(1, narrow.shape[heads + 1]):
        return None
    count = sizes[heads + 1]
    is_alone = all(same(a, b) for i, (a, b) in enumerate(zip(narrow.shape, sizes, strict=True)) if i != heads + 1)
    merged = [*sizes[:heads], sizes[heads] * count, *sizes[heads + 2 :]]
    is_merged = all(same(a, b) for a, b in zip(merged, x.shape, strict=True))
    if not is_alone or not is_merged or not isinstance(count, int) or count < 2:
        return None
    return Repeat(count, source, lambda: _call(wide, "squeeze", wide, heads + 1))


def _is(number: int, size: Any) -> bool:
    return isinstance(size, int) and size == number


def _call(like: fx.Node, method: str, x: fx.Node, *args: Any) -> fx.Node:
    """Return a call of a method of `x`, by the line that called `like`, with its example."""
    made = x.graph.call_method(method, (x, *args))
    made.meta = {name: like.meta[name] for name in ("stack_trace", "nn_module_stack") if name in like.meta}
    made.meta["example_value"] = getattr(_example(x), method)(*args)
    return made


# ---- what lies between -----------------------------------------------------------------------------------------------


def _is_unwritten(first: fx.Node, last: fx.Node) -> bool:
    """Return True if no node from `first` on, up to `last`, can write into a tensor."""
    node = first
    while node is not last:
        if not _writes_nothing(node):
            return False
        node = node.next
    return True


def _writes_nothing(node: fx.Node) -> bool:
    """Return True for what is known to compute and to write nothing: the rest may write into anything."""
    if "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return node.target in PURE_METHODS
    return node.op in ("placeholder", "get_attr") or (node.op == "call_function" and node.target in PURE_FUNCTIONS)


# ---- which kernel ----------------------------------------------------------------------------------------------------


class Called(TorchDispatchMode):
    """Notes which operators of attention are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] if "attention" in str(func) else []
        return func(*args, **(kwargs or {}))


def _is_same_kernel(node: fx.Node, given: dict[int, fx.Node]) -> bool:
    """Return True if torch picks one fused kernel, with and without groups, for what an attention is called with."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _example)
    before = _kernel(args, kwargs)
    args = tuple(_example(given[i]) if i in given else x for i, x in enumerate(args))
    named = {INPUTS[i]: _example(x) for i, x in given.items() if i >= len(args)}
    return before is not None and before == _kernel(args, {**kwargs, **named, "enable_gqa": True})


def _kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the fused operator that torch calls; None if it is not one alone."""
    modes = [x.fake_mode for x in (*args, *kwargs.values()) if isinstance(x, torch._subclasses.FakeTensor)]
    if not modes:
        return None
    shapes = modes[0].shape_env
    with modes[0], shapes.suppress_guards() if shapes else nullcontext(), Called() as called:
        try:
            scaled_dot_product_attention(*args, **kwargs)
        except RuntimeError:
            return None
    return called.names[0] if len(called.names) == 1 else None
