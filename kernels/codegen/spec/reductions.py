"""Reductions of rows: all that is known of each, in one row of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fp8compile.kernels.codegen.spec import value_range
from fp8compile.kernels.codegen.spec.region import ROW_REDUCTIONS
from fp8compile.kernels.codegen.spec.value_range import RangeRule

TO_FLOAT = ".to(tl.float32, bitcast=True)"


@dataclass(frozen=True)
class RowReduction:
    """A reduction of each row, `torch` of it with one column; what follows is Triton text for the parts of it.

    fill: what stands beyond the last row and column. element: what is reduced, made of a tile. zero: its neutral
    element, for a tile of {shape}. join: one of two tiles of elements. total: a tile of elements, reduced along its
    rows. helpers: functions of the generated file that these call. any_zero: torch and Triton may give zeros of
    different signs. Maxima are taken of integers, which do not lose a nan.
    """

    torch: Callable[[Tensor], Tensor]
    fill: str
    element: str
    zero: str
    join: str
    total: str
    range: RangeRule
    helpers: tuple[str, ...] = ()
    any_zero: bool = False


SUM = RowReduction(
    lambda x: x.sum(1, keepdim=True),
    fill="0.0",
    element="{}",
    zero="tl.zeros({shape}, tl.float32)",
    join="{} + {}",
    total="tl.sum({}, 1, keep_dims=True)",
    range=value_range.total,
    any_zero=True,
)
AMAX = RowReduction(
    lambda x: x.abs().amax(1, keepdim=True),
    fill="0.0",
    element="magnitude({})",
    zero="tl.zeros({shape}, tl.int32)",
    join="tl.maximum({}, {})",
    total=f"tl.max({{}}, 1, keep_dims=True){TO_FLOAT}",
    range=value_range.never_negative,
    helpers=("magnitude",),
)
MAX = RowReduction(
    lambda x: x.amax(1, keepdim=True),
    fill='float("-inf")',
    element="ordered({}, 0x7FFFFFFF)",
    zero="tl.full({shape}, -0x7FFFFFFF, tl.int32)",
    join="tl.maximum({}, {})",
    total="from_ordered(tl.max({}, 1, keep_dims=True))",
    range=value_range.same,
    helpers=("ordered", "from_ordered"),
    any_zero=True,
)
MIN = RowReduction(
    lambda x: x.amin(1, keepdim=True),
    fill='float("inf")',
    element="ordered({}, -0x7FFFFFFF)",
    zero="tl.full({shape}, 0x7FFFFFFF, tl.int32)",
    join="tl.minimum({}, {})",
    total="from_ordered(tl.min({}, 1, keep_dims=True))",
    range=value_range.same,
    helpers=("ordered", "from_ordered"),
    any_zero=True,
)
REDUCTIONS = {"row_sum": SUM, "row_max": MAX, "row_min": MIN, "row_amax": AMAX}
assert tuple(REDUCTIONS) == ROW_REDUCTIONS
