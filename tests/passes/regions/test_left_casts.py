"""Casts that no region takes read the scales that regions store."""

from __future__ import annotations

import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, nn


class Concatenated(nn.Module):
    """Two layers that read one input; the output of one is spread over all rows, and so is its gradient."""

    def __init__(self, spread_first: bool) -> None:
        super().__init__()
        self.spread_first = spread_first
        self.spread, self.dense, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.spread(x).mean(1, keepdim=True).expand(4, 16, 32), self.dense(x)]
        return self.out(torch.cat(parts if self.spread_first else parts[::-1], -1))


@pytest.mark.parametrize("spread_first", [True, False])
def test_a_cast_beside_regions_reads_their_scale(spread_first: bool) -> None:
    """Both gradients have one scale: that of their concatenation, which a region computes."""
    model, x = Concatenated(spread_first), torch.randn(4, 16, 32, requires_grad=True)
    options = {"select": "all", "executor": "eager", "strict": True}
    run = torch.compile(model, backend="fp8", options=options)
    want, got = (torch.autograd.grad(f(x).square().sum(), [x, *model.parameters()]) for f in (model, run))
    assert all(sqnr(w, g) > 15 for w, g in zip(want, got, strict=True))
