"""Casts of gradients that repeat: those of a mean or a sum over tokens, which autograd expands without a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


class Pooled(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pool = nn.Linear(64, 64), nn.Linear(64, 16), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x)))


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of tokens": lambda h: h.mean(1),
    "sum of tokens": lambda h: h.sum(1),
    "columns repeated": lambda h: h.mean(-1, keepdim=True).expand(-1, -1, 64),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("loss", [lambda o: o.float().sum(), lambda o: o.float().square().mean()], ids=["sum", "mean"])
def test_gradients_that_repeat_are_cast_whole(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Pooled(POOLS[name]).bfloat16(), torch.randn(8, 32, 64).bfloat16()
    loss(model(x)).backward()
    expected = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    options = {"executor": "eager", "select": "all", "strict": True}
    loss(torch.compile(model, backend="fp8", options=options)(x)).backward()
    for n, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad.float() - expected[n]).norm() < 0.13 * expected[n].norm(), n
