"""Strides that a convolution's backward reads, where a dimension has one element: a stride there leads nowhere.

Inductor gives such a dimension any stride, when a view is computed again that eager PyTorch would have saved:

    x.transpose(1, 2).unflatten(2, (3, 11))      [1, 19, 3, 11] with strides (627, 1, 209, 19) in eager PyTorch
                                                 the same memory with strides (19, 1, 209, 19) in Inductor

cuDNN goes by all four when it decides whether the gradient of the weight is channels last, and what torch predicts of
it is another rule: a step then ends in an AssertionError on strides. Of a dense tensor's strides both say the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from fp8compile.torch_hooks.inductor.our_graph import is_ours


def read_dense_strides() -> None:
    """Patch how Inductor lowers the backward pass of a convolution; for graphs of ours it does more."""
    operator = torch.ops.aten.convolution_backward.default
    lower: Callable[..., Any] = lowering.lowerings[operator]

    @functools.wraps(lower)
    def lowered(gradient: Any, of: Any, *others: Any, **named: Any) -> Any:
        if is_ours():
            gradient, of = _dense(gradient), _dense(of)
        return lower(gradient, of, *others, **named)

    lowering.lowerings[operator] = lowered


def _dense(x: ir.TensorBox) -> ir.TensorBox:
    """Return `x` with the strides of a dense tensor, channels last or first, if only dimensions of one have others."""
    realized = ir.ExternKernel.realize_input(x)
    if not ir.is_storage_and_layout(realized):
        return x
    storage, layout = ir.as_storage_and_layout(realized, freeze=True)
    channels_last = [0, *range(2, len(layout.size)), 1]
    for order in (channels_last, range(len(layout.size))):
        strides = _strides(layout.size, order)
        if _equal(layout.stride, strides):
            return x
        long = [not V.graph.sizevars.statically_known_equals(size, 1) for size in layout.size]
        if _equal(
            *([s for s, is_long in zip(given, long, strict=True) if is_long] for given in (layout.stride, strides))
        ):
            dense = ir.FixedLayout(layout.device, layout.dtype, layout.size, strides, layout.offset)
            return ir.TensorBox(ir.ReinterpretView(data=storage, layout=dense))
    return x


def _strides(size: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the strides of a dense tensor whose dimensions lie in this order, the last one closest."""
    strides, elements = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = elements
        elements = elements * size[dim]
    return strides


def _equal(mine: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(V.graph.sizevars.statically_known_equals(a, b) for a, b in zip(mine, others, strict=True))
