"""A row of logits within a kernel: its scores, block by block, and the sum of their powers.

**Few instructions.** What belongs to a row is computed once for it; only the block of the label compares with the
label; only the last block knows that classes end. Eight neighbours share a maximum, so a sum is moved to another one
once in eight elements.

Rows are read up to `width`, a multiple of 16 where there is room between them, so that loads are as wide as they can be
whatever the number of classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

NEAR: Any = tl.constexpr(8)  # neighbours that share a maximum: what a thread loads at once
LOG2_E: Any = tl.constexpr(1.4426950408889634)
LOG_2: Any = tl.constexpr(0.6931471805599453)
POWER_OF_2: Any = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")  # tl.exp2 takes three instructions more for subnormals


class Row(NamedTuple):
    """A row of logits: its label, its number of classes, how many numbers of it may be read, and `Curve`."""

    logits: Any
    label: Any
    classes: Any
    width: Any
    inner: Any
    outer: Any


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
def scores(logits, row, CURVE: tl.constexpr):  # noqa: N803
    """`Curve.scores`. CURVE: "none", "scaled", or "capped"."""
    z = logits.to(tl.float32)
    if CURVE != "none":
        z *= row.inner
    if CURVE == "capped":
        z = row.outer * (2 * tl.sigmoid(2 * z) - 1)  # tanh, for which Triton has no operation of its own
    return z


@triton.jit
def derivative(z, row, CURVE: tl.constexpr):  # noqa: N803
    """Return that of scores by logits, where scores are z."""
    found = row.inner
    if CURVE == "capped":
        found = row.inner * (row.outer - z * (z / row.outer))  # inner · outer · (1 − tanh²)
    return found


@triton.jit
def scores_of(row, start, CURVE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Return the classes of a block [BLOCK / NEAR, NEAR], and their scores: minus infinity where there is no class.
    WHOLE: all are classes."""
    column = start + NEAR * tl.arange(0, BLOCK // NEAR)[:, None] + tl.arange(0, NEAR)[None, :]
    if WHOLE:
        z = scores(tl.load(row.logits + column), row, CURVE)
    else:
        x = tl.load(row.logits + column, mask=column < row.width, other=0.0)
        z = tl.where(column < row.classes, scores(x, row, CURVE), -float("inf"))
    return column, z


@triton.jit
def has_label(row, start, BLOCK: tl.constexpr):  # noqa: N803
    """True if the label is one of the classes of a block."""
    return (row.label >= start) & (row.label < start + BLOCK)


@triton.jit
def look_at(
    row,
    start,
    tops,
    totals,
    sums,
    CURVE: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Return tops, totals and sums with those of a block."""
    column, z = scores_of(row, start, CURVE, WHOLE, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    if SUM:
        sums += tl.sum(tl.where(column < row.classes, z, 0.0), 1)
    if has_label(row, start, BLOCK):
        z = tl.where(column == row.label, -float("inf"), z)
    larger = tl.maximum(tops, tl.max(z, 1))
    shift = finite(larger)
    totals *= power_of_2((tops - shift) * LOG2_E, ASSEMBLED)
    totals += tl.sum(power_of_2((z - shift[:, None]) * LOG2_E, ASSEMBLED), 1)
    return larger, totals, sums


@triton.jit
def others_of(
    row,
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
    whole = row.classes // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tops, totals, sums = look_at(row, start, tops, totals, sums, CURVE, SUM, True, ASSEMBLED, BLOCK)
    if whole < row.classes:
        tops, totals, sums = look_at(row, whole, tops, totals, sums, CURVE, SUM, False, ASSEMBLED, BLOCK)
    top = tl.max(tops, 0)
    totals *= power_of_2((tops - finite(top)) * LOG2_E, ASSEMBLED)
    return top, tl.sum(totals, 0), tl.sum(sums, 0)
