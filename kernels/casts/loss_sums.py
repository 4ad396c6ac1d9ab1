"""The sums that say how much casts lose (`kernels/casts/cast_losses.py`): their order, and the casts they are of."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

ALTERNATIVES = ("e4m3 tensor", "e4m3 row", "e4m3 group(128)", "e4m3 group(16)", "e5m2 tensor", "e5m2 row")
SATURATED = {"e4m3": 464.0, "e5m2": 61440.0}  # the maximum and half a step: 448 + 32/2, 57344 + 8192/2

LINE = ("noise", *ALTERNATIVES, "signal")  # Σ (x − x̂)² under the cast and each alternative, Σ x²
COUNTS = ("nonzero", "underflown", "above")  # above: what saturates
ROW = (*LINE, *COUNTS)
SUMS = ("steps", "skipped", "elements", "amax", "saturated", *ROW)

Lines: TypeAlias = tuple[Tensor, Tensor]  # rows, columns
