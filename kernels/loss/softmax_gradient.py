"""Softmax of a chunk of logits, and their gradient in their place: one Triton kernel, one program a row.

A program reads its row twice, block by block: for the maximum and the sum of exponentials (both at once), then to write
the gradient. A row of 128k BF16 logits is 256 KiB, which the second time comes from the L2 cache. Where the gradient is
cast to FP8, its amax is that of the label, which is as large as all others together; several terms, and a cap, take a
reading more. Meaning: `softmax_step.plain_step`.

**The label's own gradient** is the sum of the other probabilities, from which the label's is left out: p − 1 would be
all rounding where p is nearly 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import E5M2, round_up
from fp8compile.kernels.casts.codes import TO_E5M2, code, magnitude, scale_of
from fp8compile.kernels.loss.softmax_row import (
    LOG2_E,
    LOG_2,
    NEAR,
    Row,
    derivative,
    finite,
    has_label,
    others_of,
    power_of_2,
    scores,
    scores_of,
)
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Codes, Curve

BLOCK = 2048
WARPS = 8
NO_LABEL, LARGEST = tl.constexpr(DROPPED), tl.constexpr(E5M2.max)  # as kernels read them


class Slope(NamedTuple):
    """The numbers that make the gradients by a row's scores: `power · falling − of_sum`, of the label `of_label`."""

    top: Any
    log2_total: Any
    falling: Any
    of_sum: Any
    of_label: Any
    is_dropped: Any


@triton.jit
def slopes_of(
    row,
    slope,
    start,
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return the classes of a block, and the gradients by their logits: 0 where there is no class."""
    column, z = scores_of(row, start, CURVE, WHOLE, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    found = power_of_2((z - slope.top) * LOG2_E - slope.log2_total, ASSEMBLED)
    if EVERY_TERM:
        found = found * slope.falling - slope.of_sum
        found *= derivative(z, row, CURVE)
    else:
        found *= slope.falling * derivative(z, row, CURVE)
    if has_label(row, start, BLOCK):
        found = tl.where(column == row.label, slope.of_label, found)
    if not WHOLE:
        found = tl.where(column < row.classes, found, 0.0)
    return column, tl.where(slope.is_dropped, 0.0, found)


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
    row,
    slope,
    start,
    codes,
    code_width,
    inverse,
    GRADIENT: tl.constexpr,  # noqa: N803
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write the gradients of a block: over its logits (GRADIENT), times `inverse` to `codes`, unless that is None."""
    column, found = slopes_of(row, slope, start, CURVE, EVERY_TERM, WHOLE, ASSEMBLED, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    if codes is not None:
        tl.store(codes + column, codes_of(found * inverse, ASSEMBLED), mask=WHOLE | (column < code_width))
    if GRADIENT:
        tl.store(row.logits + column, found.to(row.logits.dtype.element_ty), mask=WHOLE | (column < row.width))


@triton.jit
def amax_of(
    row,
    slope,
    valid,
    CURVE: tl.constexpr,  # noqa: N803
    EVERY_TERM: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return bits of the amax of a row's gradient: of one term without a cap, that of the label; else of all classes,
    read once more."""
    if not (CURVE == "capped" or EVERY_TERM):
        amax = tl.where(valid, magnitude(slope.of_label), 0)
    else:
        largest = tl.zeros([BLOCK // NEAR, NEAR], tl.int32)
        for start in range(0, row.classes, BLOCK):
            _, found = slopes_of(row, slope, start, CURVE, EVERY_TERM, False, ASSEMBLED, BLOCK)
            largest = tl.maximum(largest, magnitude(found))
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
    at = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    label = tl.load(index + at)
    row = Row(logits + at * stride, label, classes, width, inner, outer)
    valid = (label >= 0) & (label < classes)
    # read before the first reduction: those are barriers, and below other warps write over it
    mine = scores(tl.load(row.logits + label, mask=valid, other=0.0), row, CURVE)

    second, others, sum_of_scores = others_of(row, CURVE, EVERY_TERM, ASSEMBLED, BLOCK)
    top = tl.where(valid, tl.maximum(second, mine), second)
    others *= power_of_2((second - finite(top)) * LOG2_E, ASSEMBLED)
    own = tl.where(valid, power_of_2((mine - finite(top)) * LOG2_E, ASSEMBLED), 0.0)
    total = others + own
    log2_total = tl.log2(total)
    log_total = log2_total * LOG_2
    tl.store(chosen + at, tl.where(valid, (mine - top) - log_total, float("nan")))

    normaliser = tl.where(top == float("inf"), top, top + log_total)
    if EVERY_TERM:
        tl.store(chosen + rows + at, sum_of_scores - classes * normaliser)
        tl.store(chosen + 2 * rows + at, normaliser)
        tl.store(chosen + 3 * rows + at, normaliser * normaliser)

    if GRADIENT or codes is not None:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights + at)
        falling = weight
        of_sum = 0.0
        if EVERY_TERM:
            of_sum = tl.load(weights + rows + at)
            falling += classes * of_sum - tl.load(weights + 2 * rows + at)
            falling -= 2 * tl.load(weights + 3 * rows + at) * normaliser
        of_label = (own / total) * (falling - weight) - (others / total) * weight - of_sum
        of_label *= derivative(mine, row, CURVE)
        slope = Slope(top, log2_total, falling, of_sum, of_label, label == NO_LABEL)

        inverse = 1.0
        if codes is not None:
            amax = amax_of(row, slope, valid, CURVE, EVERY_TERM, ASSEMBLED, BLOCK)
            scale = scale_of(amax, False, LARGEST)
            inverse = tl.div_rn(1.0, scale)
            tl.store(scales + at, tl.where(amax == 0, 0.0, scale))
            codes += at * code_width

        whole = classes // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            write_block(
                row, slope, start, codes, code_width, inverse, GRADIENT, CURVE, EVERY_TERM, True, ASSEMBLED, BLOCK
            )
        if whole < classes:
            write_block(
                row, slope, whole, codes, code_width, inverse, GRADIENT, CURVE, EVERY_TERM, False, ASSEMBLED, BLOCK
            )


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
