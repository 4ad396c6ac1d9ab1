"""Codes of the gradient of a chunk of logits, transposed, as the matmul of the weight's gradient reads them: one Triton
kernel.

A program transposes a tile. Codes of four rows make a word, and words are transposed, as in
`kernels/casts/grouped_cast.py`: bytes would be stored one by one. Meaning: `fp8_head.turn`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import ceil_div

ROWS, COLUMNS, WARPS = 128, 128, 4  # of a tile


@triton.jit
def load_row(codes, row, column, rows, width):
    """Load a row of each word: zeros behind the last."""
    at = row[:, None].to(tl.int64) * width + column[None, :]
    return tl.load(codes + at, mask=(row[:, None] < rows) & (column[None, :] < width), other=0).to(tl.uint32)


@triton.jit
def turn_tile(codes, turned, rows, width, length, pitch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Write codes [rows, width] to turned [width, length], whose rows lie `pitch` apart, with zeros behind. All but
    `rows` are multiples of 16."""
    blocks = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // blocks
    row = block * ROWS + 4 * tl.arange(0, ROWS // 4)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    low = load_row(codes, row, column, rows, width) | (load_row(codes, row + 1, column, rows, width) << 8)
    high = load_row(codes, row + 2, column, rows, width) | (load_row(codes, row + 3, column, rows, width) << 8)
    words = tl.trans((low | (high << 16)).to(tl.int32, bitcast=True))
    word = block * (ROWS // 4) + tl.arange(0, ROWS // 4)[None, :]
    target = turned.to(tl.pointer_type(tl.int32), bitcast=True) + word
    target += column[:, None].to(tl.int64) * tl.multiple_of(pitch // 4, 4)
    tl.store(target, words, mask=(column[:, None] < width) & (word < tl.multiple_of(length // 4, 4)))


def turn(codes: Tensor, turned: Tensor) -> None:
    """Do what `fp8_head.turn` does, by one launch."""
    (rows, width), length = codes.shape, turned.shape[1]
    kernel: Any = turn_tile
    with torch.cuda.device_of(codes):
        kernel[(ceil_div(length, ROWS) * ceil_div(width, COLUMNS),)](
            codes.view(torch.uint8), turned.view(torch.uint8), rows, width, length, turned.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
