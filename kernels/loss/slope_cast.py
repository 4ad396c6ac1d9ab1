"""The gradient of a chunk of logits to E5M2, by rows, as it lies and transposed: one Triton kernel.

A program casts a tile, whose codes it writes twice. The scale of a row is made of its amax, which the kernel that has
computed the gradient knows (`kernels/loss/softmax_gradient.py`). Meaning: `fp8_head.cast_slopes`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import E5M2, ceil_div
from fp8compile.kernels.casts.grouped_cast import quotient, scale_of

ROWS, COLUMNS, WARPS = 128, 64, 8  # of a tile
LARGEST = tl.constexpr(E5M2.max)


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
    width,
    length,
    ASSEMBLED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Cast slopes [rows, classes] to codes [rows, width] and turned [width, length], with zeros around them."""
    blocks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    amax = tl.load(amaxes + row, mask=row < rows, other=0.0)
    scale = scale_of(amax.to(tl.int32, bitcast=True), False, LARGEST)
    inside = (row[:, None] < rows) & (column[None, :] < classes)
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    x = tl.load(slopes + at, mask=inside, other=0.0).to(tl.float32)
    x = quotient(x, scale[:, None], tl.div_rn(1.0, scale)[:, None], ASSEMBLED)
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    found = tl.where(inside, x, 0.0).to(tl.float8e5).to(tl.uint8, bitcast=True)
    at = row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(codes + at, found, mask=(row[:, None] < rows) & (column[None, :] < width))
    at = column[:, None].to(tl.int64) * length + row[None, :]
    tl.store(turned + at, tl.trans(found), mask=(column[:, None] < width) & (row[None, :] < length))
    tl.store(scales + row, scale, mask=(row < rows) & (tl.program_id(0) % blocks == 0))


def cast_slopes(slopes: Tensor, amaxes: Tensor, width: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `fp8_head.cast_slopes`, by one launch; `slopes` are contiguous along their rows."""
    rows, classes = slopes.shape
    codes = slopes.new_empty(rows, width, dtype=torch.uint8)
    turned = slopes.new_empty(width, length, dtype=torch.uint8)
    scales = slopes.new_empty(rows, 1, dtype=torch.float32)
    kernel: Any = cast_tile
    with torch.cuda.device_of(slopes):
        kernel[(ceil_div(length, ROWS) * ceil_div(width, COLUMNS),)](
            slopes,
            amaxes,
            codes,
            turned,
            scales,
            slopes.stride(0),
            rows,
            classes,
            width,
            length,
            ASSEMBLED=slopes.is_cuda,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return codes.view(E5M2.dtype), turned.view(E5M2.dtype), scales
