"""Gradients that are added up at places which the graph itself computes: tables of relative positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from torch import Tensor, nn

import fp8compile
from fp8compile.torch_hooks import partitioner


class Weighted(nn.Module):
    """What attention does to its scores with a table that is looked up by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 4)

    def forward(self, scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[-1], device=scores.device)
        distances = (positions[:, None] - positions[None]).abs() % 32
        return scores * self.table(distances).permute(2, 0, 1).unsqueeze(0)


@pytest.mark.slow
def test_a_table_of_distances_at_changing_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor, whose C++ adds elsewhere when it computes places in a tile that it transposes: with no budget
    all is computed again that may be."""
    monkeypatch.setattr(partitioner, "warn_user", lambda _: None)  # less than the budget cannot be kept
    torch.manual_seed(0)
    model = Weighted().bfloat16()
    given = {"select": "all", "strict": True, "save_min_bytes": 0, "activation_budget": 0.0}
    run = torch.compile(model, backend="fp8", dynamic=True, options=given)
    for length in (32, 48):
        x = torch.randn(2, 4, length, length).bfloat16()
        run(x).float().square().sum().backward()
        assert model.table.weight.grad is not None
        got = model.table.weight.grad.clone()
        model.zero_grad()
        model(x).float().square().sum().backward()
        assert sqnr(model.table.weight.grad, got) > 25  # dB: nothing that it is made of is rounded but once or twice
        model.zero_grad()
    assert "int64" in {row.dtype for row in fp8compile.last_compile().saved}  # the places are kept


class Resampler(nn.Module):
    """Learned queries, the same for each of a batch, read what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Parameter(torch.randn(5, 48)), nn.Linear(33, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.queries * 2)[None].expand(x.shape[0], -1, -1), self.keys(x)
        q, k = (t.unflatten(-1, (3, 16)).transpose(1, 2) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.slow
def test_queries_that_are_expanded_over_the_batch() -> None:
    """Nothing can be copied into a tensor whose elements share memory, as laying out attention's inputs once tried."""
    torch.manual_seed(0)
    model = Resampler().bfloat16()
    x = torch.randn(3, 9, 33).bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "save_min_bytes": 0})
    run(x).float().square().sum().backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model(x).float().square().sum().backward()
    far = {name: sqnr(p.grad, got[name]) for name, p in model.named_parameters() if p.grad.norm() > 1e-3}  # type: ignore[arg-type, union-attr]
    assert min(far.values()) > 12, far  # dB: as test_models has it for few rows
