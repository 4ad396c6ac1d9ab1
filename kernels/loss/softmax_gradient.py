"""Softmax of a chunk of logits, and their gradient in their place: one Triton kernel, one program a row.

A program reads its row twice, block by block: for the maximum and the sum of exponentials (both at once, rescaled as
the maximum grows), then to write the gradient. A row of 128k BF16 logits is 256 KiB, which the second time comes from
the L2 cache. Rows are read and written up to `width`, a multiple of 16 where there is room between them, so that loads
are as wide as they can be whatever the number of classes. Meaning: `softmax_step.plain_step`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import round_up
from fp8compile.kernels.casts.grouped_cast import magnitude
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Curve

BLOCK = 4096
WARPS = 8
NO_LABEL = tl.constexpr(DROPPED)  # as kernels read it


@triton.jit
def scores(logits, inner, outer, CAPPED: tl.constexpr):  # noqa: N803
    """`Curve.scores`."""
    z = logits * inner
    if CAPPED:
        z = outer * (2 * tl.sigmoid(2 * z) - 1)  # tanh, for which Triton has no operation of its own
    return z


@triton.jit
def top_and_total(logits, classes, width, inner, outer, CAPPED: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Return the greatest score of a row, the sum of exponentials below it, and the sum of scores (SUM; else 0)."""
    offset = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    sum_of_scores = 0.0
    for start in range(0, classes, BLOCK):
        column = start + offset
        z = scores(tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32), inner, outer, CAPPED)
        if SUM:
            sum_of_scores += tl.sum(tl.where(column < classes, z, 0.0), 0)
        z = tl.where(column < classes, z, -float("inf"))
        larger = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(larger == -float("inf"), 0.0, larger)  # nothing but -inf so far: no difference of infinities
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), 0)
        top = larger
    return top, total, sum_of_scores


@triton.jit
def softmax_gradient(
    logits,
    index,
    weights,
    chosen,
    amaxes,
    stride,
    classes,
    width,
    inner,
    outer,
    GRADIENT: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    AMAXES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write a row's log-probability to `chosen` [rows] (EVERY_TERM: four terms [4, rows]), its gradient to `logits`,
    and (AMAXES) the amax of that to `amaxes` [rows]."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    logits += row * stride
    label = tl.load(index + row)
    valid = (label >= 0) & (label < classes)
    # read before the first reduction: those are barriers, and below other warps write over it
    mine = scores(tl.load(logits + label, mask=valid, other=0.0).to(tl.float32), inner, outer, CAPPED)

    top, total, sum_of_scores = top_and_total(logits, classes, width, inner, outer, CAPPED, EVERY_TERM, BLOCK)
    log_total = tl.log(total)
    tl.store(chosen + row, tl.where(valid, (mine - top) - log_total, float("nan")))

    normaliser = tl.where(top == float("inf"), top, top + log_total)
    if EVERY_TERM:
        tl.store(chosen + rows + row, sum_of_scores - classes * normaliser)
        tl.store(chosen + 2 * rows + row, normaliser)
        tl.store(chosen + 3 * rows + row, normaliser * normaliser)

    if GRADIENT:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights + row)
        falling = weight
        of_sum = 0.0
        if EVERY_TERM:
            of_sum = tl.load(weights + rows + row)
            falling += classes * of_sum - tl.load(weights + 2 * rows + row)
            falling -= 2 * tl.load(weights + 3 * rows + row) * normaliser
        largest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = scores(tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32), inner, outer, CAPPED)
            slope = tl.exp((z - top) - log_total)
            if EVERY_TERM:
                slope = slope * falling - of_sum - tl.where(column == label, weight, 0.0)
            else:
                slope -= tl.where(column == label, 1.0, 0.0)
            if CAPPED:
                slope *= inner * (outer - z * (z / outer))  # inner · outer · (1 − tanh²)
            else:
                slope *= inner
            if not EVERY_TERM:
                slope *= weight
            slope = tl.where(label == NO_LABEL, 0.0, slope)
            rounded = slope.to(logits.dtype.element_ty)
            tl.store(logits + column, rounded, mask=column < width)
            if AMAXES:
                largest = tl.maximum(largest, tl.where(column < classes, magnitude(rounded), 0))
        if AMAXES:
            tl.store(amaxes + row, tl.max(largest, 0).to(tl.float32, bitcast=True))


def step(
    logits: Tensor,
    index: Tensor,
    weights: Tensor | None,
    curve: Curve,
    gradients: bool,
    every_term: bool = False,
    amaxes: Tensor | None = None,
) -> Tensor:
    """Return the results of `softmax_step.plain_step`, by one launch; `logits` are contiguous along their rows.

    What lies between rows, up to the next multiple of 16 columns, may be overwritten.
    """
    (rows, classes), stride = logits.shape, logits.stride(0)
    wide = round_up(classes, 16)
    shape = (len(TERMS), rows) if every_term else (rows,)
    terms = torch.empty(shape, dtype=torch.float32, device=logits.device)
    kernel: Any = softmax_gradient
    with torch.cuda.device_of(logits):
        kernel[(rows,)](
            logits,
            index.contiguous(),
            terms if weights is None else weights.contiguous(),
            terms,
            terms if amaxes is None else amaxes,
            stride,
            classes,
            wide if wide <= stride else classes,
            curve.inner,
            0.0 if curve.outer is None else curve.outer,
            GRADIENT=gradients,
            WEIGHTED=weights is not None,
            CAPPED=curve.outer is not None,
            EVERY_TERM=every_term,
            AMAXES=amaxes is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return terms
