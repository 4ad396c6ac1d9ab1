"""The softmax of a chunk of logits, the terms of its rows, and the gradient of the logits: in plain torch.

On a GPU `kernels/loss/softmax_gradient.py` does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.formats import E5M2
from fp8compile.kernels.reference import markers

# of a row: log-probability of its label; Σ log-probabilities of all classes (label smoothing); log Σ exp z; its square
TERMS = ("chosen", "sum", "normaliser", "square")
# The label of a row that has none: its terms mean nothing, and its gradient is zero, whatever its logits. A number that
# no label is by mistake, as least numbers are.
DROPPED = -1_592_586_253


@dataclass(frozen=True)
class Curve:
    """The function of logits before the softmax: z = inner · logit, or z = outer · tanh(inner · logit)."""

    inner: float = 1.0
    outer: float | None = None

    def scores(self, logits: Tensor) -> Tensor:
        """Return z, in the dtype of `logits`."""
        z = logits * self.inner
        return z if self.outer is None else torch.tanh(z) * self.outer

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return dz / dlogit."""
        if self.outer is None:
            return self.inner
        return self.inner * self.outer * (1 - torch.tanh(logits * self.inner).square())


@dataclass(frozen=True)
class Codes:
    """The gradient of logits [M, N] in FP8, by rows: E5M2[M, ≥ N], and f32[M, 1], which is 0 for a row of zeros."""

    data: Tensor
    scales: Tensor

    def write(self, slopes: Tensor) -> None:
        """Cast `slopes`, f32[M, N]; zeros behind N."""
        amax = slopes.abs().amax(1, keepdim=True)
        scale = markers.scale(amax, E5M2.name)
        self.data.view(torch.uint8).zero_()
        self.data[:, : slopes.shape[1]] = markers.quantize(slopes, scale, E5M2.name, "row")
        self.scales.copy_(torch.where(amax == 0, 0.0, scale))


# (logits, index, weights or None, curve, whether to write gradients over the logits, every term, codes of them or None)
# -> log-probabilities [M], or terms [4, M]
Step = Callable[[Tensor, Tensor, Tensor | None, Curve, bool, bool, Codes | None], Tensor]


def plain_step(
    logits: Tensor,
    index: Tensor,
    weights: Tensor | None,
    curve: Curve,
    gradients: bool,
    every_term: bool = False,
    codes: Codes | None = None,
) -> Tensor:
    """Return log-probabilities, or all terms, of a chunk; write its gradient over them if `gradients`, and to `codes`.

    A label out of range has log-probability nan.
    """
    wide = logits.float()
    z = curve.scores(wide)
    normaliser, log_probabilities = z.logsumexp(-1), z.log_softmax(-1)
    valid = (index >= 0) & (index < logits.shape[1])
    at = torch.where(valid, index, 0).unsqueeze(1)
    chosen = torch.where(valid, log_probabilities.gather(1, at).squeeze(1), torch.nan)
    if gradients or codes is not None:
        p = log_probabilities.exp()
        others = p.scatter(1, at, 0.0).sum(1, keepdim=True)  # 1 − p would be all rounding where a label's p is nearly 1
        if not every_term:
            weight, of_sum = 1.0 if weights is None else weights.unsqueeze(1), 0.0
            falling: Tensor | float = weight
        else:
            assert weights is not None
            weight, of_sum, of_normaliser, of_square = weights.unsqueeze(2)
            falling = weight + logits.shape[1] * of_sum - of_normaliser - 2 * of_square * normaliser.unsqueeze(1)
        of_label = p.gather(1, at) * (falling - weight) - others * weight - of_sum
        slope = p * falling - of_sum
        slope = torch.where(valid.unsqueeze(1), slope.scatter(1, at, of_label), slope)
        slope = torch.where((index == DROPPED).unsqueeze(1), 0.0, slope * curve.slope(wide))
        if codes is not None:
            codes.write(slope)
        if gradients:
            logits.copy_(slope)
    if not every_term:
        return chosen
    return torch.stack([chosen, log_probabilities.sum(-1), normaliser, normaliser.square()])
