"""The matmuls of an output head in FP8, chunk by chunk, with sums in FP32.

    logits       x by rows, E4M3        @ weight by rows (a scale for each class), E4M3      FP32 sums, rounded to BF16
    grad_input   slopes by rows, E5M2   @ weight by columns (a scale for each feature), E4M3
    grad_weight  codes of the slopes    @ x · scale of the slopes' row, by columns, E4M3     of several chunks at once

**One payload of the slopes** (the gradient of the logits) serves both gradients. grad_weight adds over rows, so the
scale of a row may stand at either operand: it multiplies x before that is cast, and what is left of the slopes are
codes without a scale, the same bytes transposed.

**When weights' gradients are computed.** A product that is added to an FP32 sum [N, K] moves 16 bytes an element,
however few rows it adds: of 2048 rows that takes about as long as their matmul. So the codes of several chunks are
kept, one byte a logit, and one matmul computes the gradient of their rows (`rows_at_once`). Where codes of all rows
take no more than the sum and such a block of them do, there is no sum: they wait for backward, whose one matmul writes
the gradient in the parameter's dtype (`waits_for_backward`).

**Rows of cache lines.** What is contracted, classes or rows, is filled up with zeros to a multiple of 128 (`LINE`).

**Why E5M2.** A slope is the probability of a class, and at the label that minus one. By rows the label's entry is the
largest, so half of the smallest number of E4M3, 2⁻¹⁰ of 448, is 2.2e-6 of it: with 128k classes most probabilities lie
below. They would all be zero, and no class that is rare would be made rarer. E5M2 reaches down to 1.3e-10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import ALIGNMENT, E4M3, E5M2, LINE, ROW, round_up
from fp8compile.kernels.loss.plain_head import add_grad_weight
from fp8compile.kernels.loss.softmax_step import Codes
from fp8compile.kernels.reference import markers

LEAST_ROWS, MOST_ROWS = 512, 2048  # of a chunk: more are no faster
LEAST_AT_ONCE = 8192  # rows: of narrow heads, whose sum is small
PIECE = 16384  # classes whose gradient is computed before it is added: that product is all the memory it takes


def rows_at_once(k: int) -> int:
    """Return of how many rows the gradient of a weight [N, K] is computed at once: of so many that their codes take 4NK
    bytes, as the sum does; where that is small, of more."""
    return max(4 * k, LEAST_AT_ONCE)


def waits_for_backward(m: int, k: int) -> bool:
    """Return True if backward computes the gradient of a weight [N, K], of the codes of all `m` rows: they take MN
    bytes, where a sum and the codes of a block take 4NK and `rows_at_once` · N."""
    return 0 < m <= 4 * k + rows_at_once(k)


def empty_waiting(x: Tensor, width: int) -> list[Tensor]:
    """Return the operands of the matmul that waits, uninitialised: codes of `width` classes, E5M2[width, length], and x
    by columns, E4M3[K, length] and f32[K, 1]."""
    k, length = x.shape[1], round_up(x.shape[0], LINE)
    shapes = {E5M2.dtype: [width, length], E4M3.dtype: [k, length], torch.float32: [k, 1]}
    return [x.new_empty(shape, dtype=dtype) for dtype, shape in shapes.items()]


def rows_by_default(m: int) -> int:
    """Return how many of `m` rows a chunk has by default: no chunk reads the sum, so its size depends on no features. A
    quarter of all, with which logits (2 bytes), their codes and those that wait take no more than BF16 logits."""
    return min(MOST_ROWS, max(m // 4, LEAST_ROWS))


def rows_of_chunk(rows: int) -> int:
    """Return how many rows a chunk has where `rows` are asked for: codes of each chunk begin at a multiple of 16."""
    return max(rows // ALIGNMENT, 1) * ALIGNMENT


@dataclass(frozen=True)
class Casts:
    """A head's operands in FP8: `x` by rows, `weight` by rows, and of the weight's transpose by rows if that is read.

    Each is (data, scale), both contiguous; classes are filled up with zeros to a multiple of 128.
    """

    x: tuple[Tensor, Tensor]
    weight: tuple[Tensor, Tensor]
    turned: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Block:
    """Rows whose weight gradient one matmul computes: codes of their slopes, transposed, E5M2[width, length], and the
    scales of those, f32[rows, 1]: 0 of rows without a slope, whose x is 0 then."""

    rows: slice
    turned: Tensor
    scales: Tensor

    def columns(self, part: slice) -> Tensor:
        """Return where the codes of some rows belong; of the last rows with what fills them up."""
        start = part.start - self.rows.start
        return self.turned[:, start:] if part.stop == self.rows.stop else self.turned[:, start:][:, : _length(part)]


def _length(part: slice) -> int:
    return part.stop - part.start


def turn(codes: Tensor, turned: Tensor) -> None:
    """Write `codes`, E5M2[M, width], transposed to `turned`, E5M2[width, ≥ M], with zeros behind.

    In plain torch; `kernels/loss/turned_codes.py` does the same on a GPU.
    """
    turned.view(torch.uint8).zero_()
    turned[:, : codes.shape[0]] = codes.t()


def cast_columns(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return x [M, K] by columns: E4M3[K, length] with zeros behind its rows, and scales f32[K, 1].

    In plain torch; `kernels/casts/grouped_cast.py` does the same on a GPU.
    """
    scale = markers.scale(markers.amax(x, str(ROW), True), E4M3.name)
    return markers.quantize(x, scale, E4M3.name, str(ROW), True, 1, length), scale


def multiply_into(out: Tensor, *operands: Any) -> None:
    """Write a product of `markers.scaled_mm` to `out`."""
    a, scale_a, of_a, b, scale_b, of_b = operands
    out.copy_(markers.scaled_mm(a, scale_a, of_a, b, scale_b, of_b, None, out.dtype))


@dataclass
class Fp8Head:
    """x [M, K] @ weight [N, K]ᵀ + bias [N], and its gradients. x: before its cast, for grad_weight, which
    `exact_grad_weight` leaves in the dtype of x, and `waits` to backward. fast_accumulation: of the logits."""

    x: Tensor
    casts: Casts
    bias: Tensor | None
    classes: int
    exact_grad_weight: bool = False
    waits: bool = False
    fast_accumulation: bool = False
    scaled_mm: Callable[..., Tensor] = markers.scaled_mm
    multiply_into: Callable[..., None] = multiply_into
    cast_columns: Callable[[Tensor, int], tuple[Tensor, Tensor]] = cast_columns
    turn: Callable[[Tensor, Tensor], None] = turn
    one: Tensor = field(init=False)
    block: Block | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Make the scale of what has none."""
        self.one = self.x.new_ones([], dtype=torch.float32)

    def logits(self, part: slice) -> Tensor:
        """Return the logits of rows."""
        data, scale = self.casts.x
        left = data[part], scale[part], "row"
        wide = self.scaled_mm(*left, *self.casts.weight, "row", None, self.x.dtype, self.fast_accumulation)
        logits = wide[:, : self.classes]
        if self.bias is not None:
            logits += self.bias
        return logits

    def codes(self, part: slice, wanted: Sequence[bool]) -> Codes | None:
        """Return where codes of the slopes are written: their scales belong to the block."""
        if not (wanted[0] or self._weighs(wanted)):
            return None
        data = self.x.new_empty(_length(part), self.casts.weight[0].shape[0], dtype=E5M2.dtype)
        if not self._weighs(wanted):
            return Codes(data, self.x.new_empty(_length(part), 1, dtype=torch.float32))
        block = self._block(part)
        return Codes(data, block.scales[part.start - block.rows.start :][: _length(part)])

    def reads_slopes(self, wanted: Sequence[bool]) -> bool:
        """Return True if a gradient is computed in the dtype of x: that of the bias, and a weight's that is exact."""
        return wanted[2] or (wanted[1] and self.exact_grad_weight)

    def _weighs(self, wanted: Sequence[bool]) -> bool:
        return wanted[1] and not self.exact_grad_weight

    def add_gradients(
        self, part: slice, slopes: Tensor, codes: Codes | None, of_x: Tensor | None, of_weight: Tensor | None
    ) -> None:
        """Write the gradient of x; after a block's last rows, write or add to that of the weight, if it is given."""
        if of_x is not None:
            assert codes is not None
            assert self.casts.turned is not None
            self.multiply_into(of_x, codes.data, codes.scales, "row", *self.casts.turned, "row")
        if of_weight is None and not self.waits:
            return
        if self.exact_grad_weight:
            assert of_weight is not None
            add_grad_weight(of_weight, slopes, self.x[part], adds=part.start > 0)
            return
        assert codes is not None
        block = self._block(part)
        self.turn(codes.data, block.columns(part))
        if of_weight is not None and part.stop == block.rows.stop:
            self._add_grad_weight(of_weight, block)
            self.block = None

    def waiting(self) -> list[Tensor]:
        """Return the operands of grad_weight (`empty_waiting`), when all rows have been given; there may be none."""
        if self.block is None:
            codes, columns, of_columns = empty_waiting(self.x, self.casts.weight[0].shape[0])
            return [codes, columns, of_columns.fill_(1.0)]
        return [self.block.turned, *self._scaled_x(self.block)]

    def _block(self, part: slice) -> Block:
        """Return the block of some rows, a new one for the first of its rows."""
        if self.block is None:
            (m, k), size, width = self.x.shape, _length(part), self.casts.weight[0].shape[0]
            most = m if self.waits else max(rows_at_once(k) // size, 1) * size
            rows = slice(part.start, min(part.start + most, m))
            turned = self.x.new_empty(width, round_up(_length(rows), LINE), dtype=E5M2.dtype)
            self.block = Block(rows, turned, self.x.new_empty(_length(rows), 1, dtype=torch.float32))
        return self.block

    def _add_grad_weight(self, of_weight: Tensor, block: Block) -> None:
        data, by_columns = self._scaled_x(block)
        turned = block.turned[: self.classes]
        if not block.rows.start:
            self.multiply_into(of_weight, turned, self.one, "tensor", data, by_columns, "row")
            return
        for codes, total in zip(turned.split(PIECE), of_weight.split(PIECE), strict=True):
            total += self.scaled_mm(codes, self.one, "tensor", data, by_columns, "row", None, torch.float32)

    def _scaled_x(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return x times the scales of the slopes, by columns: E4M3[K, length] with zeros behind its rows, f32[K, 1].

        In BF16 or FP32 before the cast: a scale is too small for FP16.
        """
        own = self.x[block.rows]
        scaled = own.new_empty(own.shape, dtype=torch.float32 if own.dtype is torch.float32 else torch.bfloat16)
        torch.mul(own, block.scales, out=scaled)
        return self.cast_columns(scaled, block.turned.shape[1])
