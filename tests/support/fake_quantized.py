"""Fake-quantized eager training: what a recipe means for a model, said once more without the compiler.

    output      = Q(x, rows of k) @ Q(w, rows of k)ᵀ + b
    grad_input  = Q(g, rows of n) @ Q(wᵀ, rows of n)ᵀ
    grad_weight = Q(gᵀ, rows of m) @ Q(xᵀ, rows of m)ᵀ           Q = dequantize(quantize(·)), in FP32

Inside `fake_quantized(recipe)` every matmul with a weight that eager PyTorch runs is replaced: F.linear (nn.Linear,
nn.MultiheadAttention), torch.addmm (transformers' Conv1D), weight @ x, convolutions whose patches do not overlap, and
F.grouped_mm (experts): in rows whatever the recipe; but for weights in grad_input, and grad_weight: with one scale an
expert where the recipe has one a tensor.
Nothing here comes from fp8compile: the formats' maxima, the scales and the recipes are written down again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3 = (torch.float8_e4m3fn, 448.0)
E5M2 = (torch.float8_e5m2, 57344.0)

# recipe -> the casts of (output: x, w), (grad_input: g, w), (grad_weight: g, x): (granularity, format), or None
TENSOR, ROW, GROUP, BLOCK = ("tensor", E4M3), ("row", E4M3), ("group", E4M3), ("block", E4M3)
TENSOR_E5M2 = ("tensor", E5M2)
RECIPES = {
    "mixed": ((ROW, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
    "tensorwise": ((TENSOR, TENSOR), (TENSOR_E5M2, TENSOR), (TENSOR_E5M2, TENSOR)),
    "rowwise": ((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "rowwise_with_gw_hp": ((ROW, ROW), (ROW, ROW), (None, None)),
    "blockwise": ((GROUP, BLOCK), (GROUP, BLOCK), (GROUP, GROUP)),
}
BY_ROWS = ((ROW, ROW), (ROW, ROW))
OF_EXPERTS = {
    "mixed": ((ROW, ROW), (ROW, TENSOR), (TENSOR, TENSOR)),
    "tensorwise": ((ROW, ROW), (ROW, TENSOR), (TENSOR, TENSOR)),
    "rowwise": (*BY_ROWS, (ROW, ROW)),
    "rowwise_with_gw_hp": (*BY_ROWS, (None, None)),
    "blockwise": (*BY_ROWS, (ROW, ROW)),
}


def sqnr(reference: Tensor, x: Tensor) -> float:
    """Signal to quantization noise in dB: 10 log10(Σ reference² / Σ (reference − x)²)."""
    signal = reference.double().square().sum().item()
    noise = (reference.double() - x.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def fake_quantize(x: Tensor, cast: tuple[str, tuple[torch.dtype, float]] | None, headroom: float = 1.0) -> Tensor:
    """x [R, C], C contracted, rounded to FP8 and back, in FP32; 128 is the size of groups and blocks.

    `headroom` makes the scale larger by this factor. Below two it costs a floating-point format nothing, but falls on
    other roundings: another draw of the same noise.
    """
    x = x.float()
    if cast is None or not x.numel():
        return x
    granularity, (dtype, largest) = cast
    if granularity == "tensor":
        amax = x.abs().max()
    elif granularity == "row":
        amax = x.abs().amax(1, keepdim=True)
    else:
        amax = torch.empty_like(x)
        height = 1 if granularity == "group" else 128
        for strip, kept in zip(x.split(height, 0), amax.split(height, 0), strict=True):
            for tile, out in zip(strip.split(128, 1), kept.split(128, 1), strict=True):
                out.fill_(tile.abs().max())
    scale = torch.where(amax > 0, amax * headroom / largest, 1.0)
    return (x / scale).clamp(-largest, largest).to(dtype).float() * scale


class _Linear(torch.autograd.Function):
    """x [M, K] @ w [N, K]ᵀ, its three matmuls in the casts of a recipe; results rounded to the operands' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, casts: Any, headroom: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.headroom, ctx.has_bias = casts, headroom, b is not None
        of_x, of_w = ctx.recipe[0]
        out = fake_quantize(x, of_x, headroom) @ fake_quantize(w, of_w, headroom).t()
        return (out if b is None else out + b.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, w), headroom = ctx.saved_tensors, ctx.headroom
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            of_g, of_w = ctx.recipe[1]
            grad_x = (fake_quantize(grad, of_g, headroom) @ fake_quantize(w.t(), of_w, headroom).t()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_g, of_x = ctx.recipe[2]
            grad_w = (fake_quantize(grad.t(), of_g, headroom) @ fake_quantize(x.t(), of_x, headroom).t()).to(w.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_b = grad.float().sum(0).to(grad.dtype)
        return grad_x, grad_w, grad_b, None, None


@contextlib.contextmanager
def fake_quantized(recipe: str, leave: Collection[nn.Parameter] = (), headroom: float = 1.0) -> Iterator[list[str]]:
    """Run eager matmuls with a weight in the numerics of `recipe`, forward and backward, but for the weights `leave`.

    Yields a list which gets one entry for each replaced matmul of the forward half.
    """
    left = {id(p) for p in leave}
    seen: list[str] = []

    def linear(x: Tensor, w: Tensor, b: Tensor | None, casts: Any = RECIPES) -> Tensor:
        seen.append(f"{list(x.shape)} @ {list(w.shape)}")
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w, b = (t if t is None else t.to(dtype) for t in (x, w, b))
        out = _Linear.apply(x.reshape(-1, x.shape[-1]), w, b, casts[recipe], headroom)
        return out.reshape(*x.shape[:-1], w.shape[0])

    def is_weight(t: object) -> bool:
        return isinstance(t, nn.Parameter) and id(t) not in left

    with contextlib.ExitStack() as stack:
        for owner, name, make in _REPLACED:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, make(original, linear, is_weight)))
        yield seen


Op = Callable[..., Tensor]
IsWeight = Callable[[object], bool]
Make = Callable[[Op, Op, IsWeight], Op]


def _make_linear(original: Op, linear: Op, is_weight: IsWeight) -> Op:
    def replaced(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear(x, w, b) if is_weight(w) else original(x, w, b)

    return replaced


def _make_addmm(original: Op, linear: Op, is_weight: IsWeight) -> Op:
    def replaced(b: Tensor, x: Tensor, w: Tensor, **options: Any) -> Tensor:
        return linear(x, w.t(), b) if is_weight(w) and not options else original(b, x, w, **options)

    return replaced


def _make_matmul(original: Op, linear: Op, is_weight: IsWeight) -> Op:
    def replaced(a: Tensor, b: Tensor) -> Tensor:
        if is_weight(a) and a.dim() == 2 and b.dim() >= 2:  # (w @ b) = (bᵀ @ wᵀ)ᵀ
            return linear(b.transpose(-1, -2), a, None).transpose(-1, -2)
        if is_weight(b) and b.dim() == 2:
            return linear(a, b.t(), None)
        return original(a, b)

    return replaced


def _make_convolution(original: Op, linear: Op, is_weight: IsWeight) -> Op:
    def replaced(x: Tensor, w: Tensor, b: Tensor | None = None, *how: Any) -> Tensor:
        stride, padding, dilation, groups = (*how, *(1, 0, 1, 1)[len(how) :])
        kernel = list(w.shape[2:])
        patches = _each(stride, kernel) == kernel and not any(_each(padding, kernel)) and groups == 1
        if not (patches and is_weight(w) and set(_each(dilation, kernel)) == {1}):
            return original(x, w, b, *how)
        # [B, C, G·P, G·P] -> [B, G, G, C·P·P]
        (batch, channels, height, width), (p, q) = x.shape, kernel
        cut = x.reshape(batch, channels, height // p, p, width // q, q).permute(0, 2, 4, 1, 3, 5)
        rows = cut.reshape(batch, height // p, width // q, channels * p * q)
        return linear(rows, w.reshape(w.shape[0], -1), b).permute(0, 3, 1, 2)

    return replaced


def _make_grouped(original: Op, linear: Op, is_weight: IsWeight) -> Op:
    def replaced(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
        owner = w if w._base is None else w._base
        if isinstance(owner, nn.Parameter) and not is_weight(owner):  # it may be a BF16 copy, too
            return original(x, w, offs=offs)
        ends = offs.tolist()
        groups = zip([0, *ends], ends, w, strict=False)
        return torch.cat([linear(x[start:end], of.t(), None, OF_EXPERTS) for start, end, of in groups])

    return replaced


def _each(value: int | Sequence[int], kernel: list[int]) -> list[int]:
    return [value] * len(kernel) if isinstance(value, int) else list(value)


_REPLACED: tuple[tuple[Any, str, Make], ...] = (
    (F, "linear", _make_linear),
    (torch, "addmm", _make_addmm),
    (torch.Tensor, "__matmul__", _make_matmul),
    (F, "conv2d", _make_convolution),
    (F, "grouped_mm", _make_grouped),
)
