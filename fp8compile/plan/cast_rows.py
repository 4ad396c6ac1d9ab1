"""Rows of cast statistics: the figures of one operand of one matmul, made of sums over all measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.kernels.casts.loss_sums import ALTERNATIVES, LINE, SUMS


@dataclass(frozen=True)
class Row:
    """One operand of one matmul, over all measured steps. what_if: SQNR in dB by cast; sqnr None: it was never finite,
    or all zeros.

    evenly: (by_rows, by_columns) by cast. trait: "product" of an operand that is the product of two matmuls' results,
    as SwiGLU's. delayed: of how many steps its scale comes, 0: of this one. role "saved": a tensor kept for backward;
    occurrence and side are then the rest of its key.
    """

    path: str
    role: str
    occurrence: int
    side: str
    cast: str
    steps: int
    skipped: int
    amax: float
    saturated: float
    underflown: float
    sqnr: float | None
    what_if: dict[str, float | None] = field(default_factory=dict)
    by_rows: float | None = None
    by_columns: float | None = None
    evenly: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    trait: str = ""
    delayed: int = 0


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of both measurements together."""
    where = SUMS.index("amax")
    total = a + b
    total[where] = torch.maximum(a[where], b[where])
    return total


def row_of(operand: Sequence[Any], cast: str, sums: Sequence[float], trait: str = "", history: int = 0) -> Row:
    """Return the row of an operand, given its key (path, role, occurrence, side) and the sums of all measured steps."""
    s = dict(zip(SUMS, sums, strict=False))
    path, role, occurrence, side = operand
    rows, columns = (sums[len(SUMS) + i * len(LINE) :][: len(LINE)] for i in range(2))
    # Σ signal / signal is how many there are
    even = [(_decibels(rows[-1], r), _decibels(columns[-1], c)) for r, c in zip(rows[:-1], columns[:-1], strict=True)]
    return Row(
        path, role, occurrence, side, cast, int(s["steps"]), int(s["skipped"]), s["amax"],
        s["saturated"] / max(s["elements"], 1), s["underflown"] / max(s["nonzero"], 1),
        _decibels(s["signal"], s["noise"]), {c: _decibels(s["signal"], s[c]) for c in ALTERNATIVES},
        *even[0], dict(zip(ALTERNATIVES, even[1:], strict=True)), trait, history,
    )  # fmt: skip


def _decibels(signal: float, noise: float) -> float | None:
    """Return a ratio in dB; None for silence, 200 where nothing was lost."""
    if signal == 0:
        return None
    return 200.0 if noise == 0 else 10 * math.log10(signal / noise)
