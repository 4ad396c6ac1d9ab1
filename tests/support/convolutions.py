"""A convolution of tokens: it reads them channels last, through a transposed view."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CASES = (  # space, batch, and whether backward computes the view again
    ((3, 4), 1, True), ((3, 4), 1, False), ((1,), 2, True), ((12,), 1, True), ((1, 4), 2, True), ((2, 1, 4), 1, True),
)  # fmt: skip
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class OfTokens(nn.Module):
    """[batch, tokens, channels] -> loss. checkpointed: backward computes the view again, and what it is a view of."""

    def __init__(self, space: tuple[int, ...], checkpointed: bool, channels: int = 19) -> None:
        super().__init__()
        self.space, self.tokens, self.channels, self.checkpointed = space, math.prod(space), channels, checkpointed
        self.convolution = KINDS[len(space) - 1](channels, 2 * channels, 3, padding=1)

    def convolved(self, x: Tensor) -> Tensor:
        y = torch.stack([x, 0.5 * x], -1).amax(-1)
        return F.gelu(self.convolution(y.transpose(1, 2).unflatten(2, self.space)).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        y = checkpoint(self.convolved, x, use_reentrant=False) if self.checkpointed else self.convolved(x)
        return y.square().mean()
