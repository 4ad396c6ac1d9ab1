"""The losses of casts on a GPU: two Triton kernels. Meaning: `cast_losses.extremes` and `cast_losses.line_sums`.

`find_extremes` reads each element once: a fixed number of programs, each striding through memory, whose maxima and
counts meet in atomics on integers, which do not depend on their order. Magnitudes of floats are ordered like their
bits, inf above all numbers and nan above inf.

`add_lines` takes a tile of rows × 128 columns a program, so that groups of 128 and of 16 are whole within it, and casts
it in all ways while it is in registers. Sums over tiles are left to torch. Casts are arithmetic on FP32, to nearest
even: no assembler and no GPU generation is asked for FP8, and Triton's interpreter gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import ceil_div, parse_granularity
from fp8compile.kernels.casts.loss_sums import LINE, ROW, SATURATED, Lines

BLOCK = 8192
PROGRAMS = 1024  # a few for each of a GPU's multiprocessors
TILE_ROWS = 64
TILE_COLUMNS = 128
# Which of two strides of x is 1 decides how it is read; for the rest, no kernel of its own
SIZES = ("batches", "rows", "columns", "x_batch", "scale_batch", "scale_row", "scale_column", "height", "width")
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # as plain torch, which rounds the product in x − data · scale


@triton.jit
def find_extremes(
    x,
    scale,
    found,
    count,
    LIMIT: tl.constexpr,  # noqa: N803
    COUNTED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PROGRAMS: tl.constexpr,  # noqa: N803
):
    """Write the bits of max |x| to found[0]; if COUNTED, add how many are above scale · LIMIT to found[1]."""
    bound = float("inf")
    if COUNTED:
        bound = tl.load(scale) * LIMIT
    largest = tl.zeros([BLOCK], tl.int32)
    above = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.cdiv(count, BLOCK * PROGRAMS)):
        place = (turn * PROGRAMS + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.abs(tl.load(x + place, mask=place < count, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True))
        if COUNTED:
            above += (value > bound).to(tl.int32)
    tl.atomic_max(found, tl.max(largest, 0).to(tl.int64))
    if COUNTED:
        tl.atomic_add(found + 1, tl.sum(above.to(tl.int64), 0))


@triton.jit
def rounded(x, E5M2: tl.constexpr):  # noqa: N803
    """Return `x`, FP32 of at most the format's maximum, rounded to the format, to even where two are as near."""
    dropped = 21 if E5M2 else 20  # bits of the mantissa
    least = 2.0**-14 if E5M2 else 2.0**-6  # normal number
    shift = 1.5 * 2.0**7 if E5M2 else 1.5 * 2.0**14  # with it, the last bit of FP32 is the least number
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) & (-1 << dropped)
    return tl.where(tl.abs(x) < least, (x + shift) - shift, bits.to(tl.float32, bitcast=True))


@triton.jit
def cast(x, scale, E5M2: tl.constexpr):  # noqa: N803
    """Return what `reference.quantize` does, in FP32."""
    limit = 57344.0 if E5M2 else 448.0
    return rounded(tl.minimum(tl.maximum(tl.div_rn(x, scale), -limit), limit), E5M2)


@triton.jit
def noise(x, amax, E5M2: tl.constexpr):  # noqa: N803
    """(x − x̂)² under a current scale (`reference.scale`)."""
    limit = 57344.0 if E5M2 else 448.0
    scale = tl.where(amax == 0, 1.0, tl.maximum(tl.div_rn(amax, limit), 1.1754943508222875e-38))
    difference = x - cast(x, scale, E5M2) * scale
    return difference * difference


@triton.jit
def over_rows(sums, place, kept, value):
    """Store the sum of each row of a tile [rows, 8, 16]."""
    tl.store(sums + place, tl.sum(tl.sum(value, 2, keep_dims=True), 1, keep_dims=True), mask=kept)


@triton.jit
def over_columns(sums, place, kept, value):
    """Store the sum of each column of a tile [rows, 8, 16]."""
    tl.store(sums + place, tl.sum(value, 0, keep_dims=True), mask=kept)


@triton.jit
def of_line(exact, lost, of_all, of_row, of_128, of_16, N: tl.constexpr):  # noqa: N803
    """Return the terms that sum number N of `loss_sums.LINE` adds up."""
    if N == 0:
        value = lost * lost
    elif N == 1:
        value = noise(exact, of_all, False)
    elif N == 2:
        value = noise(exact, of_row, False)
    elif N == 3:
        value = noise(exact, of_128, False)
    elif N == 4:
        value = noise(exact, of_16, False)
    elif N == 5:
        value = noise(exact, of_all, True)
    elif N == 6:
        value = noise(exact, of_row, True)
    else:
        value = exact * exact
    return value


@triton.jit(do_not_specialize=SIZES)
def add_lines(
    x,
    scale,
    row_amax,
    largest,
    row_sums,
    column_sums,
    batches,
    rows,
    columns,
    x_batch,
    x_row,
    x_column,
    scale_batch,
    scale_row,
    scale_column,
    height,
    width,
    LIMIT: tl.constexpr,  # noqa: N803
    E5M2: tl.constexpr,  # noqa: N803
    OF_ROW: tl.constexpr,  # noqa: N803
    OF_LINE: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_COLUMNS: tl.constexpr,  # noqa: N803
):
    """Write the sums of a tile.

    row_sums [column tiles, OF_ROW, batches · rows], column_sums [row tiles, OF_LINE, batches · columns].
    """
    across, down = tl.cdiv(columns, TILE_COLUMNS), tl.cdiv(rows, TILE_ROWS)
    tile_column = tl.program_id(0) % across
    tile_row = tl.program_id(0) // across % down
    batch = (tl.program_id(0) // across // down).to(tl.int64)
    row = (tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None, None].to(tl.int64)
    group = tl.arange(0, TILE_COLUMNS // 16)[None, :, None]
    column = (tile_column * TILE_COLUMNS + group * 16 + tl.arange(0, 16)[None, None, :]).to(tl.int64)
    inside = (row < rows) & (column < columns)
    exact = tl.load(x + batch * x_batch + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    place = batch * scale_batch + (row // height) * scale_row + (column // width) * scale_column
    own = tl.load(scale + place, mask=inside, other=1.0)
    data = cast(exact, own, E5M2)
    lost = exact - data * own

    of_all = tl.load(largest)
    of_row = tl.load(row_amax + batch * rows + row, mask=row < rows, other=0.0).to(tl.float32)
    of_16 = tl.max(tl.abs(exact), 2, keep_dims=True)
    of_128 = tl.max(of_16, 1, keep_dims=True)

    at_row = tile_column.to(tl.int64) * OF_ROW * batches * rows + batch * rows + row
    at_column = tile_row.to(tl.int64) * OF_LINE * batches * columns + batch * columns + column
    for n in tl.static_range(OF_LINE):
        value = of_line(exact, lost, of_all, of_row, of_128, of_16, n)
        over_rows(row_sums, at_row + n * batches * rows, row < rows, value)
        over_columns(column_sums, at_column + n * batches * columns, column < columns, value)
    at_row += OF_LINE * batches * rows
    over_rows(row_sums, at_row, row < rows, (exact != 0).to(tl.float32))
    over_rows(row_sums, at_row + batches * rows, row < rows, ((exact != 0) & (data == 0)).to(tl.float32))
    above = (tl.abs(exact) > own * LIMIT).to(tl.float32)
    over_rows(row_sums, at_row + 2 * batches * rows, row < rows, above)


def extremes(tensors: Sequence[Tensor], scale: Tensor | None, format: str) -> tuple[Tensor, Tensor]:
    """Return `cast_losses.extremes`, by one launch for each tensor."""
    found = torch.zeros(2, dtype=torch.int64, device=tensors[0].device)
    kernel: Any = find_extremes
    for x in tensors:
        in_memory = x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d))).contiguous()  # as it lies, if dense
        with torch.cuda.device_of(x):
            kernel[(min(PROGRAMS, ceil_div(x.numel(), BLOCK)),)](
                in_memory, found if scale is None else scale, found, x.numel(),
                LIMIT=SATURATED[format], COUNTED=scale is not None, BLOCK=BLOCK, PROGRAMS=PROGRAMS, **OPTIONS,
            )  # fmt: skip
    return found[0].to(torch.int32).view(torch.float32), found[1]


def line_sums(x: Tensor, scale: Tensor, cast: str, largest: Tensor) -> Lines:
    """Return `cast_losses.line_sums`; FP32 sums over a tile are off by 2^-20 at most."""
    format, granularity = cast.split(" ")
    how = parse_granularity(granularity)
    batches, rows, columns = x.shape
    down, across = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    row_sums = torch.empty(across, len(ROW), batches * rows, dtype=torch.float32, device=x.device)
    column_sums = torch.empty(down, len(LINE), batches * columns, dtype=torch.float32, device=x.device)
    row_amax = torch.linalg.vector_norm(x, torch.inf, -1)  # contiguous, however x lies
    kernel: Any = add_lines
    with torch.cuda.device_of(x):
        kernel[(across * down * batches,)](
            x, scale, row_amax, largest, row_sums, column_sums, batches, rows, columns,
            *x.stride(), scale.stride(0) if scale.shape[0] > 1 else 0, *scale.stride()[1:],
            how.size if how.kind == "block" else (rows if how.kind == "tensor" else 1),
            how.size if how.kind in ("group", "block") else columns,
            LIMIT=SATURATED[format], E5M2=format == "e5m2", OF_ROW=len(ROW), OF_LINE=len(LINE),
            TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, **OPTIONS,
        )  # fmt: skip
    return row_sums.sum(0, dtype=torch.float64), column_sums.sum(0, dtype=torch.float64)
