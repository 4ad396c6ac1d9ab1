"""Shards of many weights to E4M3 in one launch: a Triton kernel whose programs look up which tile of which they have.

    target[:R] = quantize(shard [R, C], scale of its weight)          of every `Part`; meaning: `reference.quantize`

A model has hundreds of weights, and launching a kernel for each takes the host longer than casting them takes the GPU.
So addresses and sizes lie in a small tensor beside the weights, which is sent again only when one of them has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.formats import ALIGNMENT, ceil_div

BLOCK = 128  # rows and columns that share a scale, where a weight has more than one
ROWS, COLUMNS, WARPS = 16, 512, 8  # of a tile
FIELDS = 6  # of a part in the table: addresses of shard, target and scales; first row; rows; columns
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def cast_tiles(
    table,
    tiles,
    FIELDS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Tile number tiles[p, 1] of part number tiles[p, 0] of `table` [parts, FIELDS]; BLOCKS: 128×128 share a scale."""
    part = table + tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * FIELDS
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    shard = tl.multiple_of(tl.load(part).to(tl.pointer_type(DTYPE)), 16)  # pyright: ignore[reportArgumentType]
    target = tl.multiple_of(tl.load(part + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
    scales = tl.load(part + 2).to(tl.pointer_type(tl.float32))
    rows, columns = tl.load(part + 4), tl.multiple_of(tl.load(part + 5), 16)
    across = tl.cdiv(columns, COLUMNS)
    row = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(shard + (row * columns + column), mask=inside, other=0.0).to(tl.float32)
    if BLOCKS:
        block = (tl.load(part + 3) + row) // 128 * tl.cdiv(columns, 128) + column // 128
        scale = tl.load(scales + block, mask=inside, other=1.0)
    else:
        scale = tl.load(scales)
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))  # nan stays nan
    tl.store(target + (row * columns + column), scaled.to(tl.float8e4nv), mask=inside)


@dataclass(frozen=True)
class Part:
    """A shard [R, C] of a weight, where its payload goes, the scales of the weight, and its place in it.

    target: E4M3, contiguous, [R or more, C]; scale: FP32 [] or [blocks of rows, blocks of columns] of the weight;
    first: which row of the weight is the shard's first.
    """

    shard: Tensor
    target: Tensor
    scale: Tensor
    first: int

    @property
    def kind(self) -> tuple[torch.dtype, bool]:
        """The properties that parts of one launch share: the shard's dtype, and True for scales of blocks."""
        return self.shard.dtype, self.scale.dim() == 2

    @property
    def is_aligned(self) -> bool:
        """True if it can be read and written 16 bytes at a time."""
        aligned = self.shard.data_ptr() % 16 == self.target.data_ptr() % 16 == self.shard.shape[1] % ALIGNMENT == 0
        return aligned and self.shard.is_contiguous()

    def fields(self) -> tuple[int, ...]:
        """Return its row of the table."""
        addresses = self.shard.data_ptr(), self.target.data_ptr(), self.scale.data_ptr()
        return *addresses, self.first, *self.shard.shape


class Launch:
    """Casts the parts of one kind; knows what the device was told of them."""

    def __init__(self) -> None:
        self.fields: list[tuple[int, ...]] = []
        self.table = self.tiles = torch.empty(0, dtype=torch.float32, device="cpu")

    def run(self, parts: Sequence[Part]) -> None:
        """Cast `parts`, all of them aligned, not empty, and of one kind on one device."""
        fields, device = [part.fields() for part in parts], parts[0].shard.device
        if fields != self.fields:
            if [f[-2:] for f in fields] != [f[-2:] for f in self.fields]:
                self.tiles = _sent(_tiles([f[-2:] for f in fields]), device)
            self.table, self.fields = _sent(torch.tensor(fields, dtype=torch.int64, device="cpu"), device), fields
        dtype, blocks = parts[0].kind
        kernel: Any = cast_tiles
        with torch.cuda.device_of(self.table):
            kernel[(len(self.tiles),)](
                self.table, self.tiles, FIELDS=FIELDS, DTYPE=DTYPES[dtype], BLOCKS=blocks,
                ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
            )  # fmt: skip


def _tiles(shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return (part, tile of it) of every program."""
    counts = [ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS) for rows, columns in shapes]
    with torch.device("cpu"):
        numbers = [torch.tensor([i], dtype=torch.int64) for i in range(len(counts))]
        return torch.cat([torch.cartesian_prod(i, torch.arange(n)) for i, n in zip(numbers, counts, strict=True)]).int()


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`, without waiting for it (torch keeps pinned memory until a copy has read it)."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
