"""FP8 formats and the granularity of scales.

    x ≈ data * scale          data in `Format`, scale in FP32, laid out by `Granularity`

| granularity | one scale for | shape of the scale of data[..., R, C] |
|---|---|---|
| tensor   | the whole tensor                      | []                             |
| row      | a row, along the contracted dimension | [..., R, 1]                    |
| group(g) | 1×g elements of a row                 | [..., R, ceil(C / g)]          |
| block(b) | b×b elements                          | [..., ceil(R / b), ceil(C / b)] |

C is always the contracted dimension of the matmul that the data is for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile.errors import OptionError, shown, unknown_name


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format: its name, its torch dtype and its largest finite value."""

    name: str
    dtype: torch.dtype
    max: float

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
FORMATS = {f.name: f for f in (E4M3, E5M2)}
FP8_DTYPES = {f.dtype: f for f in FORMATS.values()}


def parse_format(value: Format | str) -> Format:
    """Return the `Format` called `value` ("e4m3" or "e5m2")."""
    if isinstance(value, Format):
        return value
    if not isinstance(value, str) or value not in FORMATS:
        raise unknown_name("format", value, FORMATS)
    return FORMATS[value]


@dataclass(frozen=True)
class Granularity:
    """The elements that share a scale: `kind` is tensor, row, group or block; `size` is g or b (0 otherwise)."""

    kind: str
    size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise unknown_name("granularity", self.kind, GRANULARITY_NAMES)
        if not isinstance(self.size, int) or isinstance(self.size, bool):
            raise OptionError(f"granularity {self.kind!r}: its size is a number of elements, not {shown(self.size)}")
        if (self.kind in ("group", "block")) != (self.size > 0):
            raise OptionError(f"granularity {self.kind!r} with size {self.size}: only group and block have a size")

    def __str__(self) -> str:
        return f"{self.kind}({self.size})" if self.size else self.kind

    def scale_shape(self, shape: Sequence[Any]) -> list[Any]:
        """Return the shape of the scale of data with this `shape` [..., R, C]; sizes may be symbolic."""
        *batch, rows, cols = shape
        if self.kind == "tensor":
            return []
        if self.kind == "row":
            return [*batch, rows, 1]
        if self.kind == "group":
            return [*batch, rows, ceil_div(cols, self.size)]
        return [*batch, ceil_div(rows, self.size), ceil_div(cols, self.size)]


ALIGNMENT = 16  # FP8 units read the contracted dimension, and write the last one, in pieces of 16
LINE = 128  # bytes of a cache line: codes whose rows do not begin at one are contracted more slowly
KINDS = ("tensor", "row", "group", "block")
GRANULARITY_NAMES = ("tensor", "row", "group(16)", "group(32)", "group(64)", "group(128)", "block(128)")
TENSOR = Granularity("tensor")
ROW = Granularity("row")
GROUP128 = Granularity("group", 128)
BLOCK128 = Granularity("block", 128)


def ceil_div(n: Any, d: int) -> Any:
    """Return ceil(n / d), for ints and symbolic ints."""
    return -(-n // d)


def round_up(n: Any, multiple: int) -> Any:
    """Return the least multiple of `multiple` that is ≥ n, for ints and symbolic ints."""
    return n if multiple == 1 else ceil_div(n, multiple) * multiple


def parse_granularity(value: Granularity | str) -> Granularity:
    """Return the `Granularity` written as `value`: "tensor", "row", "group(128)", "block(128)"."""
    if isinstance(value, Granularity):
        return value
    match = re.fullmatch(r"(tensor|row|group|block)(?:\((\d{1,9})\))?", str(value).replace(" ", ""))
    if match is None:
        raise unknown_name("granularity", value, GRANULARITY_NAMES)
    return Granularity(match[1], int(match[2] or 0))
