"""The matmuls of an output head in FP8, chunk by chunk, with sums in FP32.

    logits       x by rows, E4M3        @ weight by rows (a scale for each class), E4M3      FP32 sums, rounded to BF16
    grad_input   slopes by rows, E5M2   @ weight by columns (a scale for each feature), E4M3
    grad_weight  codes of the slopes    @ x · scale of the slopes' row, by columns, E4M3     added in FP32

**One payload of the slopes** (the gradient of the logits) serves both gradients. grad_weight adds over rows, so the
scale of a row may stand at either operand: it multiplies x before that is cast, and what is left of the slopes are
codes without a scale, the same bytes transposed.

**Why E5M2.** A slope is the probability of a class, and at the label that minus one. By rows the label's entry is the
largest, so half of the smallest number of E4M3, 2⁻¹⁰ of 448, is 2.2e-6 of it: with 128k classes most probabilities lie
below. They would all be zero, and no class that is rare would be made rarer. E5M2 reaches down to 1.3e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import ALIGNMENT, E4M3, E5M2, round_up
from fp8compile.kernels.loss.plain_head import add_grad_weight
from fp8compile.kernels.reference import grouped_reference, markers

SLOPES = E5M2.name
PIECE = 16384  # classes whose gradient is computed before it is added: that product is all the memory it takes


@dataclass(frozen=True)
class Casts:
    """A head's operands in FP8: `x` by rows, `weight` by rows, and of the weight's transpose by rows if that is read.

    Each is (data, scale), both contiguous; classes are filled up with zeros to a multiple of 16.
    """

    x: tuple[Tensor, Tensor]
    weight: tuple[Tensor, Tensor]
    turned: tuple[Tensor, Tensor] | None


# (slopes [M, N], amaxes [M], width ≥ N, length ≥ M) -> codes [M, width], transposed [width, length], scales [M, 1]
CastSlopes = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]


def cast_slopes(slopes: Tensor, amaxes: Tensor, width: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of `slopes` [M, N] by rows, the same transposed, and the scales of rows; zeros around them.

    E5M2[M, width], E5M2[width, length], f32[M, 1]. In plain torch; `kernels/loss/slope_cast.py` does the same on a GPU.
    """
    (rows, classes), scale = slopes.shape, markers.scale(amaxes.unsqueeze(1), SLOPES)
    codes = slopes.new_zeros(length, width, dtype=E5M2.dtype)
    codes[:rows, :classes] = markers.quantize(slopes, scale, SLOPES, "row")
    return codes[:rows], codes.t().contiguous(), scale


@dataclass
class Fp8Head:
    """x [M, K] @ weight [N, K]ᵀ + bias [N], and its gradients. x: before its cast, for grad_weight, which
    `exact_grad_weight` leaves in the dtype of x."""

    x: Tensor
    casts: Casts
    bias: Tensor | None
    classes: int
    exact_grad_weight: bool = False
    scaled_mm: Callable[..., Tensor] = markers.scaled_mm
    grouped_cast: Callable[..., Any] = grouped_reference.grouped_cast
    cast_slopes: CastSlopes = cast_slopes
    one: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Make the scale of what has none."""
        self.one = self.x.new_ones([], dtype=torch.float32)

    def logits(self, part: slice) -> Tensor:
        """Return the logits of rows."""
        data, scale = self.casts.x
        left = data[part], scale[part], "row"
        wide = self.scaled_mm(*left, *self.casts.weight, "row", None, self.x.dtype)
        logits = wide[:, : self.classes]
        if self.bias is not None:
            logits += self.bias
        return logits

    def amaxes(self, part: slice) -> Tensor:
        """Return a buffer for the amaxes of the slopes."""
        return self.x.new_empty(part.stop - part.start, dtype=torch.float32)

    def add_gradients(
        self, part: slice, slopes: Tensor, amaxes: Tensor | None, of_x: Tensor | None, of_weight: Tensor | None
    ) -> None:
        """Write the gradient of x, and add to that of the weight."""
        if of_weight is not None and self.exact_grad_weight:
            add_grad_weight(of_weight, slopes, self.x[part])
            of_weight = None
        if amaxes is None or (of_x is None and of_weight is None):
            return
        width, rows = self.casts.weight[0].shape[0], slopes.shape[0]
        length = grouped_reference.padded_tokens(rows, 1)
        codes, turned, scale = self.cast_slopes(slopes, amaxes, width, length)
        if of_x is not None:
            assert self.casts.turned is not None
            of_x.copy_(self.scaled_mm(codes, scale, "row", *self.casts.turned, "row", None, torch.float32))
        if of_weight is not None:
            data, by_columns = self._scaled_x(part, torch.where(amaxes.unsqueeze(1) == 0, 0.0, scale), length)
            for codes_of, total in zip(turned.split(PIECE), of_weight.split(PIECE), strict=True):
                product = self.scaled_mm(codes_of, self.one, "tensor", data, by_columns, "row", None, torch.float32)
                total += product[: total.shape[0]]

    def _scaled_x(self, part: slice, scale: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return x times the scales of the slopes, by columns: E4M3[K, length] with zeros behind its rows, f32[K, 1].

        In BF16 or FP32 before the cast: a scale is too small for FP16. Of rows without a slope it is 0 here: the 1 that
        makes their codes would make their x the largest of all.
        """
        own = self.x[part]
        scaled = (own.float() * scale).to(torch.float32 if own.dtype is torch.float32 else torch.bfloat16)
        ends = torch.full([1], scaled.shape[0], dtype=torch.int32, device=scaled.device)
        data, by_columns, _ = self.grouped_cast(scaled, ends, E4M3.name)
        data[:, round_up(scaled.shape[0], ALIGNMENT) : length].view(torch.uint8).zero_()  # nobody has written there
        return data, by_columns[0]
