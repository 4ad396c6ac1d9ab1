"""Softmax of a chunk of logits, and their gradient in their place: one Triton kernel, one program a row.

A program reads its row twice, block by block: for the maximum and the sum of exponentials (both at once), then to write
the gradient. A row of 128k BF16 logits is 256 KiB, which the second time comes from the L2 cache. Where the gradient is
cast to FP8, its amax is that of the label, which is as large as all others together; several terms, and a cap, take a
reading more. Meaning: `softmax_step.plain_step`.

**Few instructions.** With some for each rule an element took 47, and the kernel twice as long as its reads and writes.
So what belongs to a row is computed once for it; the label is looked at in its own block alone; only the last block
knows that classes end. Eight neighbours share a maximum, so a sum is moved to another one once in eight elements.

**The label's own gradient** is the sum of the other probabilities, from which the label's is left out: p − 1 would be
all rounding where p is nearly 1.

Rows are read and written up to `width`, a multiple of 16 where there is room between them, so that loads are as wide as
they can be whatever the number of classes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import E5M2, round_up
from fp8compile.kernels.casts.grouped_cast import TO_E5M2, code, magnitude, scale_of
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Codes, Curve

BLOCK = 2048
WARPS = 8
NEAR: Any = tl.constexpr(8)  # neighbours that share a maximum: what a thread loads at once
NO_LABEL, LARGEST = tl.constexpr(DROPPED), tl.constexpr(E5M2.max)  # as kernels read them
LOG2_E: Any = tl.constexpr(1.4426950408889634)
LOG_2: Any = tl.constexpr(0.6931471805599453)
POWER_OF_2: Any = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")  # tl.exp2 takes three instructions more for subnormals


@triton.jit
def power_of_2(x, ASSEMBLED: tl.constexpr):  # noqa: N803
    """2 to the power of x."""
    if ASSEMBLED:
        found = tl.inline_asm_elementwise(POWER_OF_2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = tl.exp2(x)
    return found


@triton.jit
def finite(x):
    """x, or 0 where that is minus infinity: what is subtracted from scores, of which none may be inf − inf."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def scores(logits, inner, outer, CURVE: tl.constexpr):  # noqa: N803
    """`Curve.scores`. CURVE: "none", "scaled", or "capped"."""
    z = logits
    if CURVE != "none":
        z *= inner
    if CURVE == "capped":
        z = outer * (2 * tl.sigmoid(2 * z) - 1)  # tanh, for which Triton has no operation of its own
    return z


@triton.jit
def derivative(z, inner, outer, CURVE: tl.constexpr):  # noqa: N803
    """Return that of scores by logits, where scores are z."""
    found = inner
    if CURVE == "capped":
        found = inner * (outer - z * (z / outer))  # inner · outer · (1 − tanh²)
    return found


@triton.jit
def scores_of(
    logits,
    start,
    classes,
    width,
    inner,
    outer,
    CURVE: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return the classes of a block [BLOCK / NEAR, NEAR], and their scores: minus infinity where there is no class.
    WHOLE: all are classes."""
    column = start + NEAR * tl.arange(0, BLOCK // NEAR)[:, None] + tl.arange(0, NEAR)[None, :]
    if WHOLE:
        z = scores(tl.load(logits + column).to(tl.float32), inner, outer, CURVE)
    else:
        x = tl.load(logits + column, mask=column < width, other=0.0)
        z = tl.where(column < classes, scores(x.to(tl.float32), inner, outer, CURVE), -float("inf"))
    return column, z


@triton.jit
def is_in(label, start, BLOCK: tl.constexpr):  # noqa: N803
    """True if the class `label` is one of a block."""
    return (label >= start) & (label < start + BLOCK)


@triton.jit
def look_at(
    logits,
    start,
    label,
    tops,
    totals,
    sums,
    classes,
    width,
    inner,
    outer,
    CURVE: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return tops, totals and sums with those of a block."""
    column, z = scores_of(logits, start, classes, width, inner, outer, CURVE, WHOLE, BLOCK)
    if SUM:
        sums += tl.sum(tl.where(column < classes, z, 0.0), 1)
    if is_in(label, start, BLOCK):
        z = tl.where(column == label, -float("inf"), z)
    larger = tl.maximum(tops, tl.max(z, 1))
    shift = finite(larger)
    totals *= power_of_2((tops - shift) * LOG2_E, ASSEMBLED)
    totals += tl.sum(power_of_2((z - shift[:, None]) * LOG2_E, ASSEMBLED), 1)
    return larger, totals, sums


@triton.jit
def others_of(
    logits,
    label,
    classes,
    width,
    inner,
    outer,
    CURVE: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return of all classes but the label the greatest score and the sum of powers below it; and the sum of all scores
    (SUM; else 0). Lanes have a maximum and sums of their own: they meet once, at the end, without a barrier for every
    block."""
    tops = tl.full([BLOCK // NEAR], -float("inf"), tl.float32)
    totals = tl.zeros([BLOCK // NEAR], tl.float32)
    sums = tl.zeros([BLOCK // NEAR], tl.float32)
    whole = classes // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tops, totals, sums = look_at(  # pyright: ignore[reportGeneralTypeIssues]
            logits, start, label, tops, totals, sums, classes, width, inner, outer, CURVE, SUM, True, ASSEMBLED, BLOCK
        )
    if whole < classes:
        tops, totals, sums = look_at(  # pyright: ignore[reportGeneralTypeIssues]
            logits, whole, label, tops, totals, sums, classes, width, inner, outer, CURVE, SUM, False, ASSEMBLED, BLOCK
        )
    top = tl.max(tops, 0)
    totals *= power_of_2((tops - finite(top)) * LOG2_E, ASSEMBLED)
    return top, tl.sum(totals, 0), tl.sum(sums, 0)


@triton.jit
def slopes(
    z,
    top,
    log2_total,
    falling,
    of_sum,
    inner,
    outer,
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
):
    """Return the gradient of the loss by logits with scores `z`, none of which is the label's."""
    slope = power_of_2((z - top) * LOG2_E - log2_total, ASSEMBLED)
    if EVERY_TERM:
        slope = slope * falling - of_sum
        slope *= derivative(z, inner, outer, CURVE)
    else:
        slope *= falling * derivative(z, inner, outer, CURVE)
    return slope


@triton.jit
def slopes_of(
    logits,
    start,
    label,
    of_label,
    top,
    log2_total,
    falling,
    of_sum,
    classes,
    width,
    inner,
    outer,
    is_dropped,
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return the classes of a block, and the gradients by their logits: 0 where there is no class."""
    column, z = scores_of(logits, start, classes, width, inner, outer, CURVE, WHOLE, BLOCK)
    slope = slopes(z, top, log2_total, falling, of_sum, inner, outer, CURVE, EVERY_TERM, ASSEMBLED)
    if is_in(label, start, BLOCK):
        slope = tl.where(column == label, of_label, slope)
    if not WHOLE:
        slope = tl.where(column < classes, slope, 0.0)
    return column, tl.where(is_dropped, 0.0, slope)


@triton.jit
def codes_of(x, ASSEMBLED: tl.constexpr):  # noqa: N803
    """Return bytes of E5M2."""
    if ASSEMBLED:
        found = tl.inline_asm_elementwise(TO_E5M2, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        found = code(x, LARGEST).to(tl.uint8)
    return found


@triton.jit
def write_block(
    logits,
    codes,
    start,
    label,
    of_label,
    top,
    log2_total,
    falling,
    of_sum,
    inverse,
    classes,
    width,
    code_width,
    inner,
    outer,
    is_dropped,
    GRADIENT: tl.constexpr,  # noqa: N803
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write the gradients of a block: to `logits` (GRADIENT), times `inverse` to `codes`, unless that is None."""
    column, slope = slopes_of(
        logits, start, label, of_label, top, log2_total, falling, of_sum, classes, width, inner, outer, is_dropped,
        CURVE, EVERY_TERM, WHOLE, ASSEMBLED, BLOCK,
    )  # fmt: skip
    if codes is not None:
        tl.store(codes + column, codes_of(slope * inverse, ASSEMBLED), mask=WHOLE | (column < code_width))
    if GRADIENT:
        tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=WHOLE | (column < width))


@triton.jit
def amax_of(
    logits,
    label,
    valid,
    of_label,
    top,
    log2_total,
    falling,
    of_sum,
    classes,
    width,
    inner,
    outer,
    is_dropped,
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return bits of the amax of a row's gradient: of one term without a cap, that of the label; else of all classes,
    read once more."""
    if not (CURVE == "capped" or EVERY_TERM):
        amax = tl.where(valid, magnitude(of_label), 0)
    else:
        largest = tl.zeros([BLOCK // NEAR, NEAR], tl.int32)
        for start in range(0, classes, BLOCK):
            _, slope = slopes_of(
                logits, start, label, of_label, top, log2_total, falling, of_sum, classes, width, inner, outer,
                is_dropped, CURVE, EVERY_TERM, False, ASSEMBLED, BLOCK,
            )  # fmt: skip
            largest = tl.maximum(largest, magnitude(slope))
        amax = tl.max(tl.max(largest, 1), 0)
    return amax


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
    CURVE: tl.constexpr,  # noqa: N803
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
    mine = scores(tl.load(logits + label, mask=valid, other=0.0).to(tl.float32), inner, outer, CURVE)

    second, others, sum_of_scores = others_of(
        logits, label, classes, width, inner, outer, CURVE, EVERY_TERM, ASSEMBLED, BLOCK
    )
    top = tl.where(valid, tl.maximum(second, mine), second)
    others *= power_of_2((second - finite(top)) * LOG2_E, ASSEMBLED)
    own = tl.where(valid, power_of_2((mine - finite(top)) * LOG2_E, ASSEMBLED), 0.0)
    log2_total = tl.log2(others + own)
    log_total = log2_total * LOG_2
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
        total = others + own
        of_label = (own / total) * (falling - weight) - (others / total) * weight - of_sum
        of_label *= derivative(mine, inner, outer, CURVE)

        inverse = 1.0
        if codes is not None:
            amax = amax_of(
                logits, label, valid, of_label, top, log2_total, falling, of_sum, classes, width,
                inner, outer, is_dropped, CURVE, EVERY_TERM, ASSEMBLED, BLOCK,
            )  # fmt: skip
            scale = scale_of(amax, False, LARGEST)
            inverse = tl.div_rn(1.0, scale)
            tl.store(scales + row, tl.where(amax == 0, 0.0, scale))
            codes += row * code_width

        whole = classes // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            write_block(
                logits, codes, start, label, of_label, top, log2_total, falling, of_sum, inverse, classes, width,
                code_width, inner, outer, is_dropped, GRADIENT, CURVE, EVERY_TERM, True, ASSEMBLED, BLOCK,
            )  # fmt: skip
        if whole < classes:
            write_block(
                logits, codes, whole, label, of_label, top, log2_total, falling, of_sum, inverse, classes, width,
                code_width, inner, outer, is_dropped, GRADIENT, CURVE, EVERY_TERM, False, ASSEMBLED, BLOCK,
            )  # fmt: skip


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
    how = "capped" if curve.outer is not None else "none" if curve.inner == 1 else "scaled"
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
            CURVE=how,
            EVERY_TERM=every_term,
            ASSEMBLED=logits.is_cuda,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return terms
