"""Attention of widths that are padded for FP8 matmuls, with lengths and batches that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile

HEADS = 4


class SelfAttention(nn.Module):
    """Queries, keys and values in one layer, as GPT-2's and ViT's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recipe", ["mixed", "auto"])
@pytest.mark.parametrize(
    ("width", "rows"), [(72, [(1, 20), (1, 21)]), (72, [(2, 20), (3, 20)]), (64, [(2, 20), (3, 9)])]
)
def test_attention_is_converted(width: int, rows: list[tuple[int, int]], recipe: str) -> None:
    torch.manual_seed(0)
    model = SelfAttention(width)
    options: dict[str, Any] = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
    run = torch.compile(model, backend="fp8", options={**options, "recipe": recipe})
    for shape in rows:
        x = torch.randn(*shape, width, requires_grad=True)
        of = [x, *model.parameters()]
        wanted, found = (torch.autograd.grad(f(x).square().sum(), of) for f in (model, run))
        for a, b in zip(wanted, found, strict=True):
            assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99
    assert len(fp8compile.last_compile().converted) == 6, "in the graph of any length too"


class Batched(nn.Module):
    """Weights times what is computed from tokens, which are columns: N is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.weight, x.sin().transpose(1, 2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_matrix_of_a_batch_is_padded(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Batched()
    options = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
    run = torch.compile(model, backend="fp8", dynamic=dynamic, options=options)
    for tokens in (20, 21):
        x = torch.randn(3, tokens, 64, requires_grad=True)
        wanted, found = (torch.autograd.grad(f(x).square().sum(), [x, model.weight]) for f in (model, run))
        for a, b in zip(wanted, found, strict=True):
            assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99
        assert len(fp8compile.last_compile().converted) == 3
