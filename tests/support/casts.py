"""Casts with a known result: a region that quantizes, numbers, and their codes by hand.

With an amax equal to the format's maximum the scale is 1, so that codes follow from the format alone. The table is laid
out along diagonals: whatever shares a scale, if it is 16 long, holds each number once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import FORMATS, ceil_div
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import packed_transpose
from fp8compile.kernels.codegen.schedule.choose_schedule import choose
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value

NAN = float("nan")
INF = float("inf")
ROWS, COLS = 128, 256
GRANULARITIES = (
    "tensor",
    "row",
    "group(16)",
    "group(128)",
    "col_group(32)",
    "col_group(128)",
    "block(16)",
    "block(128)",
)

# number -> code. Ties go to the even code, numbers below half of the least subnormal to 0, which keeps its sign.
E4M3 = (
    (448.0, 0x7E), (-448.0, 0xFE), (0.0, 0x00), (-0.0, 0x80), (2.0**-9, 0x01), (2.0**-10, 0x00), (3 * 2.0**-10, 0x02),
    (-(2.0**-10), 0x80), (1.0, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (17.0, 0x58), (19.0, 0x5A), (2.0**-6, 0x08),
    (7 * 2.0**-9, 0x07), (1e-40, 0x00),
)  # fmt: skip
E5M2 = (
    (57344.0, 0x7B), (-57344.0, 0xFB), (0.0, 0x00), (-0.0, 0x80), (2.0**-16, 0x01), (2.0**-17, 0x00),
    (3 * 2.0**-17, 0x02), (-(2.0**-17), 0x80), (1.0, 0x3C), (1.125, 0x3C), (1.375, 0x3E), (18.0, 0x4C), (22.0, 0x4E),
    (2.0**-14, 0x04), (3 * 2.0**-16, 0x03), (1e-40, 0x00),
)  # fmt: skip
# What lies beyond the maximum saturates where the scale is given; infinities too, and nan stays nan.
BEYOND = {"e4m3": {449.0: 0x7E, 464.0: 0x7E, -1e30: 0xFE, INF: 0x7E, -INF: 0xFE, NAN: 0x7F}}
BEYOND["e5m2"] = {57345.0: 0x7B, 61440.0: 0x7B, -1e30: 0xFB, INF: 0x7B, -INF: 0xFB, NAN: 0x7F}


def table(format: str) -> tuple[list[float], list[int]]:
    """Sixteen numbers and their codes."""
    pairs = {"e4m3": E4M3, "e5m2": E5M2}[format]
    return [number for number, _ in pairs], [code for _, code in pairs]


def diagonals(numbers: list[Any], rows: int = ROWS, cols: int = COLS) -> Tensor:
    """[rows, cols] with element (r, c) = numbers[(r + c) mod their number]."""
    position = torch.arange(rows)[:, None] + torch.arange(cols)[None, :]
    return torch.tensor(numbers)[position % len(numbers)]


@dataclass(frozen=True)
class Cast:
    """y0 payload, y1 transposed payload, y2 scale of the [rows, cols] matrix x0; "given": the scale is x1."""

    format: str
    granularity: str
    rows: int = ROWS
    cols: int = COLS
    dtype: str = "float32"
    multiple: int = 1

    def region(self) -> Region:
        values = [Value("load", (), (0,))]
        inputs = [Input(0, self.dtype, ((self.rows, self.cols),), ((self.cols, 1),))]
        kind, size = self.kind
        if kind in ("tensor", "given"):
            inputs.append(Input(1, "float32", (), ((1, 1),) if kind == "tensor" else ()))
            values.append(Value("load_max" if kind == "tensor" else "load", (), (1,)))
        else:
            values.append(Value(f"{kind}_amax", (0,), (size,) if size else ()))
        if kind != "given":
            values.append(Value("scale", (1,), (self.format,)))
        values.append(Value("quantize", (0, len(values) - 1), (self.format,)))
        data = len(values) - 1
        high, wide = (ceil_div(n, self.multiple) * self.multiple for n in (self.rows, self.cols))
        stores = (
            Store(0, data, wide, 0, False, self.multiple, self.multiple),
            Store(1, data, high, 0, True, self.multiple, self.multiple),
            Store(2, data - 1, self.scale_shape[1]),
        )
        dtype = str(FORMATS[self.format].dtype).removeprefix("torch.")
        buffers = (Buffer((high, wide), dtype), Buffer((wide, high), dtype), Buffer(self.scale_shape, "float32"))
        return Region((Part(self.rows, self.cols, tuple(inputs), tuple(values), stores),), buffers)

    @property
    def kind(self) -> tuple[str, int]:
        name, _, size = self.granularity.partition("(")
        return name, int(size.rstrip(")") or 0)

    @property
    def shared(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        kind, size = self.kind
        return {
            "row": (1, self.cols), "group": (1, size), "col_group": (size, 1), "block": (size, size),
        }.get(kind, (self.rows, self.cols))  # fmt: skip

    @property
    def scale_shape(self) -> tuple[int, int]:
        rows, cols = self.shared
        return ceil_div(self.rows, rows), ceil_div(self.cols, cols)

    def inputs(self, x: Tensor) -> list[Tensor]:
        """x itself, and for a granularity of tensor its amax; for a given scale, 1."""
        kind = self.kind[0]
        if kind == "tensor":
            return [x, x.abs().amax().float().reshape(1)]
        return [x, torch.ones(1, device=x.device)] if kind == "given" else [x]

    def shares_with(self, row: int, col: int) -> Tensor:
        """Which elements share their scale with element (row, col)."""
        rows, cols = self.shared
        same_rows = torch.arange(self.rows) // rows == row // rows
        return same_rows[:, None] & (torch.arange(self.cols) // cols == col // cols)[None, :]


def run(cast: Cast, x: Tensor, schedule: Schedule | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, transposed codes transposed back, scales) on the CPU; both are also compared with the reference."""
    region = cast.region()
    schedule = schedule or choose(region)
    inputs = cast.inputs(x)
    target = "cuda" if x.is_cuda else "interpreter"
    buffers = generated.launch(region, schedule, inputs, [], target)
    assert check_kernel.compare(region, schedule, inputs, [], buffers) == []
    codes, transposed = (b.view(torch.uint8).cpu() for b in buffers[:2])
    return codes, transposed.t(), buffers[2].cpu()


def spoiled(cast: Cast, x: Tensor, row: int, col: int) -> Tensor:
    """Codes of the table if x[row, col] is not finite: inf / inf is nan, x / inf is ±0, x / nan is nan."""
    codes = diagonals(table(cast.format)[1]).to(torch.uint8)
    zeros = torch.where(x.signbit(), 0x80, 0x00)
    shared = zeros if not x[row, col].isnan() else torch.full_like(zeros, 0x7F)
    codes = torch.where(cast.shares_with(row, col), shared, codes).to(torch.uint8)
    codes[row, col] = 0x7F
    return codes


def tiled(cast: Cast, block_rows: int, block_cols: int, warps: int = 4, in_quarters: bool = False) -> Schedule:
    """A schedule with these tiles, as far as what shares a scale fits into one; in quarters where that is possible."""
    rows, cols = cast.shared if cast.kind[0] not in ("tensor", "given") else (1, 1)
    block_rows = max(block_rows, rows)
    block_cols = max(block_cols, 1 << (cols - 1).bit_length())
    high, wide = (ceil_div(n, cast.multiple) * cast.multiple for n in (cast.rows, cast.cols))
    in_quarters &= packed_transpose.possible(cast.region().parts[0])
    tiling = Tiling(block_rows, block_cols, ceil_div(high, block_rows), ceil_div(wide, block_cols), False, in_quarters)
    return replace(choose(cast.region()), tilings=(tiling,), warps=warps)


def same_codes(actual: Tensor, expected: Tensor, format: str) -> bool:
    """Equal bytes; every code of nan is the same."""
    first = {"e4m3": 0x7F, "e5m2": 0x7D}[format]
    nan = (expected & 0x7F) >= first
    return bool((((actual & 0x7F) >= first) == nan).all() and (actual == expected)[~nan].all())
