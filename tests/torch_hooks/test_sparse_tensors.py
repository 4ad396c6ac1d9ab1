"""Gradients that are sparse tensors, of a graph with FP8: what they hold, and what an optimizer makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quick import quicken
from torch import Tensor, nn

quicken()
TOKENS = 96


class Bag(nn.Module):
    """Sums of embeddings, of several tokens each, before layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(128, 64, mode="sum", sparse=True)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens.view(-1, 4)))


class Tokens(nn.Module):
    """Two sparse embeddings, of tokens and of places, before layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = (nn.Embedding(n, 64, sparse=True) for n in (128, TOKENS))
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(TOKENS))
        return self.layers(x)


class Pairs(nn.Module):
    """Embeddings of which the input of a matmul is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 32, sparse=True)
        self.layer = nn.Linear(64, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embed(tokens).view(-1, 64))


def trained(kind: Callable[[], nn.Module], executor: str | None) -> list[Tensor]:
    """Return gradients, and parameters after three steps of SGD; executor: None without FP8."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = kind()
    options = {"select": "all", "strict": True, "executor": executor}
    run = model if executor is None else torch.compile(model, backend="fp8", options=options)
    opt, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        opt.zero_grad()
        run(torch.randint(128, (TOKENS,))).square().mean().backward()
        found += [p.grad for p in model.parameters()]
        opt.step()
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("kind", [Bag, Tokens, Pairs])
def test_gradients(kind: Callable[[], nn.Module]) -> None:
    mine, alike, exact = (trained(kind, executor) for executor in ("inductor", "eager", None))
    assert [x.is_sparse for x in mine] == [x.is_sparse for x in exact]
    assert any(x.is_sparse for x in mine)
    for a, b, c in zip(mine, alike, exact, strict=True):
        a, b, c = a.to_dense(), b.to_dense(), c.to_dense()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
        assert float((a - c).norm()) < 0.15 * float(c.norm())
        assert torch.equal(a.any(-1), c.any(-1)), "other rows have a gradient"
    assert not torch.equal(mine[0].to_dense(), exact[0].to_dense()), "nothing was in FP8"
