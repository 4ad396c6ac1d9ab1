"""Groups of tokens to E4M3, transposed: what grad_weight of a mixture's experts contracts. Meaning:
`kernels/reference/grouped_reference.py`.

    x [T, C]   ─►   data [C, P]   scale [E, C, 1]   ends [E]           all groups at once, wherever they end

With an index x has rows in any order, of which each may be a token several times, or none: they are gathered while they
are cast, and nothing is written in between.

Where groups end only the device knows. So programs look it up, buffers have the size that suffices for all (P), and
nobody waits for anything: the host launches the same for every step, as CUDA graphs want it. Padding is written as
zeros, whatever lay there; what lies behind the last group in x is not read, and in data not written.

A program has some columns of a piece of a group. Two kernels: the first finds the amaxes, the second casts. With a
scale a column both read x; with one a group the first reads the amaxes of tokens alone, which others have found
(`benchmarks/micro/grouped_matmul.py` times both). One kernel for all, whose programs have all tokens of a group, would
keep most of the GPU waiting where one expert has most of them.

Codes of four tokens make a word, and words are transposed, as in `kernels/codegen/schedule/packed_transpose.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import ALIGNMENT, E4M3, ceil_div, round_up
from fp8compile.kernels.casts.codes import magnitude, quotient, scale_of, words_of
from fp8compile.kernels.matmul.group_lookup import lanes, look_up, of
from fp8compile.kernels.reference.grouped_reference import padded_tokens

FIND = {"TOKENS": 64, "COLUMNS": 128, "num_warps": 4}  # a tile; the fastest on an H200, of those that were tried
CAST = {"TOKENS": 256, "COLUMNS": 128, "num_warps": 8}
PIECE = 512  # tokens of a program


@triton.jit
def load_tokens(x, index, token, end, column, columns, GATHERED: tl.constexpr):  # noqa: N803
    """Load columns of tokens; zeros from `end` on, and where the index is negative."""
    if GATHERED:
        row = tl.load(index + token, mask=token < end, other=-1)
    else:
        row = tl.where(token < end, token, -1)
    here = x + row.to(tl.int64) * columns + column[None, :]
    return tl.load(here, mask=(row >= 0) & (column[None, :] < columns), other=0.0)


@triton.jit
def cast_row(
    x,
    index,
    token,
    end,
    column,
    columns,
    scale,
    inverse,
    ASSEMBLED: tl.constexpr,  # noqa: N803
    GATHERED: tl.constexpr,  # noqa: N803
):
    """Load a row of each word, and divide it by the scales; zeros from `end` on."""
    row = load_tokens(x, index, token, end, column, columns, GATHERED).to(tl.float32)
    return tl.where(token < end, quotient(row, scale[None, :], inverse[None, :], ASSEMBLED), 0.0)


@triton.jit
def cast_tile(
    x,
    index,
    data,
    first,
    end,
    place,
    room,
    column,
    columns,
    width,
    length,
    scale,
    inverse,
    ASSEMBLED: tl.constexpr,  # noqa: N803
    GATHERED: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    """Cast TOKENS tokens from `first` on to data [width, length], from `place` on: zeros behind `end`, and nothing
    behind the next `room` tokens, a multiple of 16 as `place` is."""
    token = first + 4 * tl.arange(0, TOKENS // 4)[:, None]
    a = cast_row(x, index, token, end, column, columns, scale, inverse, ASSEMBLED, GATHERED)
    b = cast_row(x, index, token + 1, end, column, columns, scale, inverse, ASSEMBLED, GATHERED)
    c = cast_row(x, index, token + 2, end, column, columns, scale, inverse, ASSEMBLED, GATHERED)
    d = cast_row(x, index, token + 3, end, column, columns, scale, inverse, ASSEMBLED, GATHERED)
    words = tl.trans(words_of(a, b, c, d, ASSEMBLED))
    word = tl.arange(0, TOKENS // 4)[None, :]
    target = data.to(tl.pointer_type(tl.int32), bitcast=True) + tl.multiple_of(place // 4, 4) + word
    target += column[:, None].to(tl.int64) * tl.multiple_of(length // 4, 4)
    left = tl.minimum(room, length - place)  # ends that decrease, which is no grouping, write nothing behind the data
    tl.store(target, words, mask=(word < tl.multiple_of(left // 4, 4)) & (column[:, None] < width))


@triton.jit
def amaxes_of(
    x,
    index,
    first,
    end,
    column,
    columns,
    GATHERED: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Bits of the amax of each column, of tokens `first` to `end`."""
    largest = tl.zeros([TOKENS, COLUMNS], tl.int32)
    token = tl.arange(0, TOKENS)[:, None]
    for start in range(first, end, TOKENS):
        row = load_tokens(x, index, start + token, end, column, columns, GATHERED)
        largest = tl.maximum(largest, magnitude(row))
    return tl.max(largest, 0)


@triton.jit
def look_up_piece(offs, groups, piece, GROUPS: tl.constexpr, PIECE: tl.constexpr):  # noqa: N803
    """(group, first token, end of its group, first padded token, padded tokens of the group from there on, whether it
    is its group's first) of a piece; the group is `groups` for pieces that there are not."""
    group, starts, stops = look_up(offs, groups, GROUPS)  # pyright: ignore[reportGeneralTypeIssues]
    rooms = tl.maximum((stops - starts + 15) // 16 * 16, 16)
    pieces = tl.where(group < groups, (rooms + PIECE - 1) // PIECE, 0)
    behind = tl.cumsum(pieces, 0)
    mine = tl.sum(((behind <= piece) & (group < groups)).to(tl.int32), 0)
    at = (piece - of(group, mine, behind - pieces)) * PIECE
    place = tl.sum(tl.where(group < mine, rooms, 0), 0) + at
    return mine, of(group, mine, starts) + at, of(group, mine, stops), place, of(group, mine, rooms) - at, at == 0


@triton.jit
def find_amaxes(
    x,
    index,
    offs,
    amaxes,
    groups,
    columns,
    width,
    GATHERED: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Some tokens of a group, some columns: into amaxes [E, width], which hold zeros at first."""
    blocks = tl.cdiv(columns, COLUMNS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mine, first, end, _, _, _ = look_up_piece(offs, groups, tl.program_id(0) // blocks, GROUPS, PIECE)
    if mine < groups:
        last = tl.minimum(end, first + PIECE)
        found = amaxes_of(x, index, first, last, column, columns, GATHERED, TOKENS, COLUMNS)
        tl.atomic_max(amaxes + mine * width + column, found, mask=column < columns, sem="relaxed")


@triton.jit
def join_amaxes(
    amax,
    offs,
    amaxes,
    groups,
    GROUPS: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
):
    """Of some tokens of a group: the largest amax into amaxes [E], which hold zeros at first."""
    mine, first, end, _, _, _ = look_up_piece(offs, groups, tl.program_id(0), GROUPS, PIECE)  # pyright: ignore[reportGeneralTypeIssues]
    token = first + tl.arange(0, PIECE)
    found = tl.max(magnitude(tl.load(amax + token, mask=(token < end) & (mine < groups), other=0.0)), 0)
    tl.atomic_max(amaxes + mine, found, mask=mine < groups, sem="relaxed")


@triton.jit
def cast_pieces(
    x,
    index,
    offs,
    amaxes,
    data,
    scales,
    ends,
    groups,
    columns,
    width,
    length,
    ONE_SCALE: tl.constexpr,  # noqa: N803
    POWER_OF_TWO: tl.constexpr,  # noqa: N803
    ASSEMBLED: tl.constexpr,  # noqa: N803
    GATHERED: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Some tokens of a group, some columns: data; of the group's first, scales and where it ends.

    amaxes: [E] with ONE_SCALE for all columns of a group, else [E, width]."""
    blocks = tl.cdiv(width, COLUMNS)
    block, piece = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    mine, first, end, place, room, is_first = look_up_piece(offs, groups, piece, GROUPS, PIECE)
    if mine < groups:
        amax = amaxes + mine + 0 * column if ONE_SCALE else amaxes + mine * width + column
        scale = scale_of(tl.load(amax, mask=column < width, other=0), POWER_OF_TWO, 448.0)
        inverse = tl.div_rn(1.0, scale)
        tl.store(scales + mine * width + column, scale, mask=is_first & (column < width))
        tl.store(ends + mine, place + room, mask=is_first & (block == 0))
        for at in range(0, tl.minimum(room, PIECE), TOKENS):
            cast_tile(
                x, index, data, first + at, end, place + at, room - at, column, columns, width, length, scale,
                inverse, ASSEMBLED, GATHERED, TOKENS,
            )  # fmt: skip


def grouped_cast(
    x: Tensor,
    offs: Tensor,
    format: str,
    power_of_two: bool = False,
    row_multiple: int = 1,
    amax: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `grouped_reference.grouped_cast` does; data behind the last group, where nothing reads, is left."""
    if format != E4M3.name:
        raise ValueError(f"grouped FP8 matmuls take e4m3, not {format}")
    tokens, groups = (x if index is None else index).shape[0], offs.shape[0]
    width, length = round_up(x.shape[1], row_multiple), padded_tokens(tokens, groups)
    data = x.new_empty(width, length, dtype=E4M3.dtype)
    scales = x.new_empty(groups, width, 1, dtype=torch.float32)
    ends = torch.empty_like(offs)
    amax, index = (t if t is None else t.contiguous() for t in (amax, index))
    launch(x.contiguous(), offs.contiguous(), data, scales, ends, power_of_two, amax, index)
    return data, scales, ends


def cast_columns(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return x [M, C] by columns, as one group: E4M3[C, length] with zeros behind its rows, and scales f32[C, 1]."""
    data = x.new_empty(x.shape[1], length, dtype=E4M3.dtype)
    data[:, round_up(x.shape[0], ALIGNMENT) :].view(torch.uint8).zero_()  # nobody else writes there
    scales = x.new_empty(1, x.shape[1], 1, dtype=torch.float32)
    ends = torch.full([1], x.shape[0], dtype=torch.int32, device=x.device)
    launch(x.contiguous(), ends, data, scales, torch.empty_like(ends), power_of_two=False)
    return data, scales[0]


def launch(
    x: Tensor,
    offs: Tensor,
    data: Tensor,
    scales: Tensor,
    ends: Tensor,
    power_of_two: bool,
    amax: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Fill data, scales and ends, by programs for as many pieces as there may be; amax and index are of each token."""
    tokens, columns = (x if index is None else index).shape[0], x.shape[1]
    groups, (width, length) = offs.shape[0], data.shape
    amaxes = x.new_zeros([groups] if amax is not None else [groups, width], dtype=torch.int32)
    pieces = tokens // PIECE + groups
    how = {"GROUPS": lanes(groups), "PIECE": PIECE}
    gathered = {"GATHERED": index is not None}
    rows = offs if index is None else index  # nobody reads offs as such
    find: Any = find_amaxes
    join: Any = join_amaxes
    cast: Any = cast_pieces
    with torch.cuda.device_of(x):
        if amax is not None:
            join[(pieces,)](amax, offs, amaxes, groups, **how)
        else:
            blocks = ceil_div(columns, FIND["COLUMNS"])
            find[(pieces * blocks,)](x, rows, offs, amaxes, groups, columns, width, **gathered, **how, **FIND)
        cast[(pieces * ceil_div(width, CAST["COLUMNS"]),)](
            x, rows, offs, amaxes, data, scales, ends, groups, columns, width, length,
            ONE_SCALE=amax is not None, POWER_OF_TWO=power_of_two, ASSEMBLED=x.is_cuda, **gathered, **how, **CAST,
        )  # fmt: skip


assert ALIGNMENT == 16, "kernels have it as a number"
