"""The gradient of a chunk of logits to E5M2, by rows, as it lies and transposed: one Triton kernel.

A program casts a tile, whose codes it writes twice. The scale of a row is made of its amax, which the kernel that has
computed the gradient knows (`kernels/loss/softmax_gradient.py`). Codes of four rows make a word, and words are
transposed, as in `kernels/casts/grouped_cast.py`. Rows are read up to a multiple of 16 where there is room between
them, so that loads are as wide as they can be. Meaning: `fp8_head.cast_slopes`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import ALIGNMENT, E5M2, ceil_div
from fp8compile.kernels.casts.grouped_cast import quotient, scale_of, words_of

ROWS, COLUMNS, WARPS = 128, 64, 8  # of a tile
LARGEST = tl.constexpr(E5M2.max)


@triton.jit
def cast_row(
    slopes,
    amaxes,
    scales,
    row,
    column,
    stride,
    rows,
    classes,
    readable,
    IS_FIRST,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
):
    """Load a row of each word, divide it by its scale, and (IS_FIRST) write that; zeros outside."""
    amax = tl.load(amaxes + row, mask=row < rows, other=0.0)
    scale = scale_of(amax.to(tl.int32, bitcast=True), False, LARGEST)
    tl.store(scales + row, scale, mask=(row < rows) & IS_FIRST)
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    x = tl.load(slopes + at, mask=(row[:, None] < rows) & (column[None, :] < readable), other=0.0).to(tl.float32)
    x = quotient(x, scale[:, None], tl.div_rn(1.0, scale)[:, None], ASSEMBLED)
    return tl.where((row[:, None] < rows) & (column[None, :] < classes), x, 0.0)


@triton.jit
def store_row(codes, words, place: tl.constexpr, row, column, rows, width):
    """Write the codes at `place` of each word as a row."""
    at = (row[:, None] + place).to(tl.int64) * width + column[None, :]
    inside = (row[:, None] + place < rows) & (column[None, :] < width)
    tl.store(codes + at, ((words >> (8 * place)) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def cast_tile(
    slopes,
    amaxes,
    codes,
    turned,
    scales,
    stride,
    rows,
    classes,
    readable,
    width,
    length,
    pitch,
    ASSEMBLED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Cast slopes [rows, classes] to codes [rows, width] and turned [width, length], whose rows lie `pitch` apart: each
    unless it is None, with zeros around. `length` and `pitch` are multiples of 16."""
    blocks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + 4 * tl.arange(0, ROWS // 4)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) % blocks == 0
    a = cast_row(slopes, amaxes, scales, row, column, stride, rows, classes, readable, first, ASSEMBLED)
    b = cast_row(slopes, amaxes, scales, row + 1, column, stride, rows, classes, readable, first, ASSEMBLED)
    c = cast_row(slopes, amaxes, scales, row + 2, column, stride, rows, classes, readable, first, ASSEMBLED)
    d = cast_row(slopes, amaxes, scales, row + 3, column, stride, rows, classes, readable, first, ASSEMBLED)
    words = words_of(a, b, c, d, ASSEMBLED, LARGEST)
    if codes is not None:
        store_row(codes, words, 0, row, column, rows, width)
        store_row(codes, words, 1, row, column, rows, width)
        store_row(codes, words, 2, row, column, rows, width)
        store_row(codes, words, 3, row, column, rows, width)
    if turned is not None:
        word = tl.program_id(0) // blocks * (ROWS // 4) + tl.arange(0, ROWS // 4)[None, :]
        target = turned.to(tl.pointer_type(tl.int32), bitcast=True) + word
        target += column[:, None].to(tl.int64) * tl.multiple_of(pitch // 4, 4)
        tl.store(target, tl.trans(words), mask=(column[:, None] < width) & (word < tl.multiple_of(length // 4, 4)))


def cast_slopes(slopes: Tensor, amaxes: Tensor, codes: Tensor | None, turned: Tensor | None) -> Tensor:
    """Do what `fp8_head.cast_slopes` does, by one launch; `slopes` are contiguous along their rows."""
    rows, classes = slopes.shape
    if turned is not None:
        (width, length), pitch = turned.shape, turned.stride(0)
    elif codes is not None:
        width, length, pitch = codes.shape[1], rows, ALIGNMENT
    else:
        raise ValueError("slopes are cast for codes or turned, and both are None")
    scales = slopes.new_empty(rows, 1, dtype=torch.float32)
    kernel: Any = cast_tile
    with torch.cuda.device_of(slopes):
        kernel[(ceil_div(length, ROWS) * ceil_div(width, COLUMNS),)](
            slopes,
            amaxes,
            None if codes is None else codes.view(torch.uint8),
            None if turned is None else turned.view(torch.uint8),
            scales,
            slopes.stride(0),
            rows,
            classes,
            width if width <= slopes.stride(0) else classes,
            width,
            length,
            pitch,
            ASSEMBLED=slopes.is_cuda,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return scales
