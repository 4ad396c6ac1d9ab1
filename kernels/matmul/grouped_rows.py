"""Rows in groups, each group times its own matrix: experts of a mixture, on Hopper. Meaning:
`kernels/reference/markers.py`, `scaled_mm` with `offs`.

    a [T, K], b [E, N, K]   ─►   out [T, N]      rows of group e times bᵀ[e]; rows behind the last group are not written

Where groups end only the device knows: programs look it up, and take one tile of the result after the other until all
are done. Operands arrive through tensor descriptors (TMA). A tile may reach into the next group, whose rows are
computed and not stored.

Sums stay in the matmul unit, which keeps 14 bits: fast accumulation, as torch has it. The bits are those of its kernel
(CUTLASS), which is slower, most of all where groups are small (`benchmarks/micro/grouped_matmul.py`). Exact sums are
left to that: a tile has no registers for two of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8compile.kernels.matmul.group_lookup import lanes, look_up, of

TILE = {"TM": 128, "TN": 256, "TK": 128}  # the fastest on an H200 of nine, for all shapes that were tried
HOW = {"num_warps": 8, "num_stages": 3}
BAND = 8  # tiles of rows that are computed together, for they share columns


@triton.jit
def place(tile, tiles_m, tiles_n, BAND: tl.constexpr):  # noqa: N803
    """(tile of rows, tile of columns): down a band of rows, then the next column."""
    band = BAND * tiles_n
    first = tile // band * BAND
    rows = tl.minimum(tiles_m - first, BAND)
    return first + tile % band % rows, tile % band // rows


@triton.jit
def store_tile(out, total, scale_a, scale_b, rows, columns, last, width):
    """Store a tile, times its scales: rows before `last`, columns before `width`."""
    a = tl.load(scale_a + rows, mask=rows < last, other=0.0)
    b = tl.load(scale_b + columns, mask=columns < width, other=0.0)
    here = out + rows[:, None].to(tl.int64) * width + columns[None, :]
    inside = (rows[:, None] < last) & (columns[None, :] < width)
    tl.store(here, (total * a[:, None] * b[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["height"])
def rows_kernel(
    a,
    b,
    scale_a,
    scale_b,
    offs,
    out,
    height,
    width,
    contracted,
    groups,
    PROGRAMS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    BAND: tl.constexpr,  # noqa: N803
    TM: tl.constexpr,  # noqa: N803
    TN: tl.constexpr,  # noqa: N803
    TK: tl.constexpr,  # noqa: N803
):
    """Tiles of out [height, width]; a: descriptor of [height, contracted], b: of [groups · width, contracted]."""
    group, start, end = look_up(offs, groups, GROUPS)  # pyright: ignore[reportGeneralTypeIssues]
    end = tl.minimum(end, height)  # whatever it says
    tiles = tl.where(group < groups, tl.cdiv(tl.maximum(end - start, 0), TM), 0)
    behind = tl.cumsum(tiles, 0)
    tiles_m, tiles_n = tl.sum(tiles, 0), tl.cdiv(width, TN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        m, n = place(tile, tiles_m, tiles_n, BAND)  # pyright: ignore[reportGeneralTypeIssues]
        mine = tl.sum(((behind <= m) & (group < groups)).to(tl.int32), 0)
        first, last = of(group, mine, start - (behind - tiles) * TM) + m * TM, of(group, mine, end)
        total = tl.zeros([TM, TN], tl.float32)
        for k in range(0, contracted, TK):
            x, y = a.load([first, k]), b.load([mine * width + n * TN, k])
            total = tl.dot(x, y.T, total)
        rows, columns = first + tl.arange(0, TM), n * TN + tl.arange(0, TN)
        store_tile(out, total, scale_a, scale_b + mine * width, rows, columns, last, width)


def fits(*payloads: Tensor) -> bool:
    """Return True if tensor descriptors can hold these payloads: they begin, and their rows do, at multiples of 16."""
    return all(x.data_ptr() % 16 == 0 and x.shape[-1] % 16 == 0 and x.is_contiguous() for x in payloads)


def multiply_rows(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """Return BF16 [T, N]: scale_a [T, 1] and scale_b [E, N, 1] are FP32, offs [E] is where groups of rows end."""
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    launch(out, a, scale_a.contiguous(), b, scale_b.contiguous(), offs)
    return out


def launch(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor) -> None:
    """Fill the rows of `out` that are in a group."""
    height, (groups, width, contracted), at_a_time = a.shape[0], b.shape, programs(a.device)
    kernel: Any = rows_kernel
    with torch.cuda.device_of(a):
        kernel[(at_a_time,)](
            described(a, "TM"), described(b.view(-1, contracted), "TN"), scale_a, scale_b, offs, out,
            height, width, contracted, groups,
            PROGRAMS=at_a_time, GROUPS=lanes(groups), BAND=BAND, **TILE, **HOW,
        )  # fmt: skip


def described(payload: Tensor, side: str) -> Any:
    """Return a descriptor of a matrix of codes, which are read in tiles of TILE[side] rows."""
    return TensorDescriptor.from_tensor(payload, [TILE[side], TILE["TK"]])


@functools.cache
def programs(device: torch.device) -> int:
    """Return how many programs run at a time: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
