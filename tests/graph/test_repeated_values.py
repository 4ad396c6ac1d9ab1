"""Sines and cosines that many elements share are computed by one kernel, and read by all others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import torch
from fake_quantized import sqnr
from torch import Tensor, nn

HEADS, WIDTH, LENGTH, LAYERS = 4, 64, 32, 2


class Rotated(nn.Module):
    """Queries rotated by their position, with angles computed on the way, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        rates = 10_000.0 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        angles = torch.arange(n)[None, :, None] * rates
        angles = torch.cat([angles, angles], -1)
        cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        for layer in self.layers:
            h = layer(x).view(b, n, HEADS, -1).transpose(1, 2)
            first, second = h.chunk(2, -1)
            h = h * cos + torch.cat([-second, first], -1) * sin
            x = x + h.transpose(1, 2).reshape(b, n, WIDTH)
        return self.out(x)


def operations(graph: str) -> Counter[str]:
    """How often regions compute what; `aten …` is what none does."""
    found = Counter(f"aten {name}" for name in re.findall(r"= (cos|sin)\(", graph))
    for start in re.finditer(r'\{"parts"', graph):
        region, _ = json.JSONDecoder().raw_decode(graph, start.start())
        found.update(v["op"] for part in region["parts"] for v in part["values"])
    return found


def test_angles_are_computed_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Rotated().bfloat16(), torch.randn(4, LENGTH, WIDTH).bfloat16()
    expected = [model(x).detach(), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    options = {"executor": "eager", "select": "all", "strict": True, "save_min_bytes": 0, "dump": str(tmp_path)}
    y = torch.compile(model, backend="fp8", dynamic=False, options=options)(x)
    got = [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]
    for mine, theirs in zip(got, expected, strict=True):
        assert sqnr(theirs, mine) > 20
    for half in ("forward", "backward"):
        (graph,) = (tmp_path / "graph0").glob(f"*_{half}_combine_regions.txt")
        counts = operations(graph.read_text())
        assert counts["cos"] == counts["sin"] == 1, half
        assert not counts["aten cos"] + counts["aten sin"], half
