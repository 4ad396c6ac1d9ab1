"""Experts as a small module of grouped matmuls, and the groups of tokens that tests give them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# how 96 tokens may fall to experts: one, evenly, unevenly, none, next to none, all to the last
GROUPS = {
    "one": [96],
    "even": [24, 24, 24, 24],
    "uneven": [1, 50, 17, 28],
    "empty": [0, 40, 0, 56],
    "eight": [3, 0, 31, 0, 1, 44, 17, 0],
    "last": [0, 0, 0, 96],
    "tail": [10, 0, 40, 20],  # and 26 tokens that belong to nobody here
}


def ends(sizes: list[int], device: str | None = None) -> Tensor:
    """Where groups of these sizes end."""
    return torch.tensor(sizes, device=device).cumsum(0).int()


class Experts(nn.Module):
    """down(silu(up(x))), each token by the expert in whose group it lies; in BF16, whatever the parameters are.

    flipped: weights [E, in, out], else [E, out, in], the two layouts that models have.
    """

    def __init__(self, experts: int, width: int = 64, inner: int = 128, flipped: bool = False) -> None:
        super().__init__()
        up, down = (experts, inner, width), (experts, width, inner)
        self.flipped = flipped
        self.up, self.down = (
            nn.Parameter((torch.randn(s) / s[-1] ** 0.5).mT.contiguous() if flipped else torch.randn(s) / s[-1] ** 0.5)
            for s in (up, down)
        )

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y = F.silu(self._each(x.bfloat16(), self.up, offs))
        return self._each(y, self.down, offs)

    def _each(self, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        weight = weight.bfloat16()
        return F.grouped_mm(x, weight if self.flipped else weight.mT, offs=offs)
