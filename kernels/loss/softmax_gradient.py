"""Softmax of a chunk of logits, and their gradient in their place: one Triton kernel, one program a row.

A program reads its row twice, block by block: for the maximum and the sum of exponentials (both at once, rescaled as
the maximum grows), then to write the gradient. A row of 128k BF16 logits is 256 KiB, which the second time comes from
the L2 cache. Where the gradient is cast to FP8, its amax is that of the label or that of the likeliest other class,
as the exponential only grows; several terms, and a cap, take a reading more. Rows are read and written up to `width`, a
multiple of 16 where there is room between them, so that loads are as wide as they can be whatever the number of
classes. Meaning: `softmax_step.plain_step`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import E5M2, round_up
from fp8compile.kernels.casts.grouped_cast import TO_E5M2, code, magnitude, quotient, scale_of
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Codes, Curve

BLOCK = 4096
WARPS = 8
NO_LABEL, LARGEST = tl.constexpr(DROPPED), tl.constexpr(E5M2.max)  # as kernels read them


@triton.jit
def scores(logits, inner, outer, CAPPED: tl.constexpr):  # noqa: N803
    """`Curve.scores`."""
    z = logits * inner
    if CAPPED:
        z = outer * (2 * tl.sigmoid(2 * z) - 1)  # tanh, for which Triton has no operation of its own
    return z


@triton.jit
def top_and_total(
    logits,
    label,
    valid,
    mine,
    classes,
    width,
    inner,
    outer,
    CAPPED: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return the greatest score of a row, the sum of exponentials below it, the sum of scores (SUM; else 0), and the
    greatest score but the label's, which is `mine`.

    Each lane has a maximum and a sum of its own: they meet once, at the end, without a barrier for every block. Of the
    two exponentials that move a sum to a new maximum and add to it, one is 1.
    """
    offset = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + offset
        z = scores(tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32), inner, outer, CAPPED)
        if SUM:
            sums += tl.where(column < classes, z, 0.0)
        z = tl.where((column < classes) & (column != label), z, -float("inf"))
        above = z - tops
        smaller = tl.where(z == -float("inf"), 0.0, tl.exp(-tl.abs(above)))  # no difference of infinities
        totals = tl.where(above > 0, totals * smaller + 1.0, totals + smaller)
        tops = tl.maximum(tops, z)
    second = tl.max(tops, 0)
    shift = tl.where(second == -float("inf"), 0.0, second)
    total = tl.sum(totals * tl.exp(tops - shift), 0)
    top = tl.where(valid, tl.maximum(second, mine), second)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = total * tl.exp(second - shift) + tl.where(valid, tl.exp(mine - shift), 0.0)
    return top, total, tl.sum(sums, 0), second


@triton.jit
def slopes(
    z,
    is_label,
    top,
    log_total,
    weight,
    falling,
    of_sum,
    inner,
    outer,
    is_dropped,
    CAPPED: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
):
    """Return the gradient of the loss by logits with scores `z`."""
    slope = tl.exp((z - top) - log_total)
    if EVERY_TERM:
        slope = slope * falling - of_sum - tl.where(is_label, weight, 0.0)
    else:
        slope -= tl.where(is_label, 1.0, 0.0)
    if CAPPED:
        slope *= inner * (outer - z * (z / outer))  # inner · outer · (1 − tanh²)
    else:
        slope *= inner
    if not EVERY_TERM:
        slope *= weight
    return tl.where(is_dropped, 0.0, slope)


@triton.jit
def amax_of(
    logits,
    label,
    valid,
    mine,
    second,
    top,
    log_total,
    weight,
    falling,
    of_sum,
    classes,
    width,
    inner,
    outer,
    is_dropped,
    CAPPED: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return bits of the amax of a row's gradient: of one term without a cap, that of the label, with score `mine`, or
    that of the likeliest other class, with score `second`; else of all classes, read once more."""
    if not (CAPPED or EVERY_TERM):
        of_label = slopes(
            mine, valid, top, log_total, weight, falling, of_sum, inner, outer, is_dropped, CAPPED, EVERY_TERM
        )
        of_second = slopes(
            second, False, top, log_total, weight, falling, of_sum, inner, outer, is_dropped, CAPPED, EVERY_TERM
        )
        amax = tl.maximum(tl.where(valid, magnitude(of_label), 0), magnitude(of_second))
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = scores(tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32), inner, outer, CAPPED)
            slope = slopes(
                z, column == label, top, log_total, weight, falling, of_sum, inner, outer, is_dropped,
                CAPPED, EVERY_TERM,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.where(column < classes, magnitude(slope), 0))
        amax = tl.max(largest, 0)
    return amax


@triton.jit
def codes_of(x, scale, ASSEMBLED: tl.constexpr):  # noqa: N803
    """Return bytes of E5M2 of x / scale."""
    x = quotient(x, scale, tl.div_rn(1.0, scale), ASSEMBLED)
    if ASSEMBLED:
        found = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        found = code(x, LARGEST).to(tl.uint8)
    return found


@triton.jit
def softmax_gradient(
    logits,
    index,
    weights,
    chosen,
    codes,
    scales,
    stride,
    classes,
    width,
    code_width,
    inner,
    outer,
    GRADIENT: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write a row's log-probability to `chosen` [rows] (EVERY_TERM: four terms [4, rows]), and its gradient to `logits`
    (GRADIENT) and, unless that is None, to `codes` [rows, code_width] and `scales` [rows]."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    logits += row * stride
    label = tl.load(index + row)
    valid = (label >= 0) & (label < classes)
    is_dropped = label == NO_LABEL
    # read before the first reduction: those are barriers, and below other warps write over it
    mine = scores(tl.load(logits + label, mask=valid, other=0.0).to(tl.float32), inner, outer, CAPPED)

    top, total, sum_of_scores, second = top_and_total(
        logits, label, valid, mine, classes, width, inner, outer, CAPPED, EVERY_TERM, BLOCK
    )
    log_total = tl.log(total)
    tl.store(chosen + row, tl.where(valid, (mine - top) - log_total, float("nan")))

    normaliser = tl.where(top == float("inf"), top, top + log_total)
    if EVERY_TERM:
        tl.store(chosen + rows + row, sum_of_scores - classes * normaliser)
        tl.store(chosen + 2 * rows + row, normaliser)
        tl.store(chosen + 3 * rows + row, normaliser * normaliser)

    if GRADIENT or codes is not None:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights + row)
        falling = weight
        of_sum = 0.0
        if EVERY_TERM:
            of_sum = tl.load(weights + rows + row)
            falling += classes * of_sum - tl.load(weights + 2 * rows + row)
            falling -= 2 * tl.load(weights + 3 * rows + row) * normaliser

        scale = 1.0
        if codes is not None:
            amax = amax_of(
                logits, label, valid, mine, second, top, log_total, weight, falling, of_sum, classes, width,
                inner, outer, is_dropped, CAPPED, EVERY_TERM, BLOCK,
            )  # fmt: skip
            scale = scale_of(amax, False, LARGEST)
            tl.store(scales + row, tl.where(amax == 0, 0.0, scale))
            codes += row * code_width

        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = scores(tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32), inner, outer, CAPPED)
            slope = slopes(
                z, column == label, top, log_total, weight, falling, of_sum, inner, outer, is_dropped,
                CAPPED, EVERY_TERM,
            )  # fmt: skip
            if codes is not None:
                found = codes_of(tl.where(column < classes, slope, 0.0), scale, ASSEMBLED)
                tl.store(codes + column, found, mask=column < code_width)
            if GRADIENT:
                tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < width)


def step(
    logits: Tensor,
    index: Tensor,
    weights: Tensor | None,
    curve: Curve,
    gradients: bool,
    every_term: bool = False,
    codes: Codes | None = None,
) -> Tensor:
    """Return the results of `softmax_step.plain_step`, by one launch; `logits` are contiguous along their rows.

    What lies between rows, up to the next multiple of 16 columns, may be overwritten.
    """
    (rows, classes), stride = logits.shape, logits.stride(0)
    wide = round_up(classes, 16)
    assert codes is None or codes.data.shape[1] <= round_up(classes, BLOCK), "programs write whole blocks"
    shape = (len(TERMS), rows) if every_term else (rows,)
    terms = torch.empty(shape, dtype=torch.float32, device=logits.device)
    kernel: Any = softmax_gradient
    with torch.cuda.device_of(logits):
        kernel[(rows,)](
            logits,
            index.contiguous(),
            terms if weights is None else weights.contiguous(),
            terms,
            None if codes is None else codes.data.view(torch.uint8),
            None if codes is None else codes.scales,
            stride,
            classes,
            wide if wide <= stride else classes,
            0 if codes is None else codes.data.shape[1],
            curve.inner,
            0.0 if curve.outer is None else curve.outer,
            GRADIENT=gradients,
            WEIGHTED=weights is not None,
            CAPPED=curve.outer is not None,
            EVERY_TERM=every_term,
            ASSEMBLED=logits.is_cuda,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return terms
