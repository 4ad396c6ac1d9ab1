"""Sines and cosines that many elements share are computed by one kernel, and read by all others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile

HEADS, WIDTH, LENGTH, LAYERS = 4, 64, 32, 2


Rotation = tuple[Tensor, Tensor]


def angles(n: int, width: int = WIDTH // HEADS) -> Tensor:
    rates = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([torch.arange(n)[:, None] * rates] * 2, -1)


class Rotated(nn.Module):
    """Queries rotated by their position, with angles computed on the way, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def rotation(self, x: Tensor) -> Rotation:
        """The cosines and sines that x [b, h, s, d] is multiplied with."""
        found = angles(x.shape[1])[None]
        cos, sin = (f(found).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        return cos, sin

    def rotated(self, x: Tensor, layer: nn.Linear, rotation: Rotation) -> Tensor:
        b, n, _ = x.shape
        h = layer(x).view(b, n, HEADS, -1).transpose(1, 2)
        first, second = h.chunk(2, -1)
        h = h * rotation[0] + torch.cat([-second, first], -1) * rotation[1]
        return x + h.transpose(1, 2).reshape(b, n, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rotation = self.rotation(x)
        for layer in self.layers:
            x = self.rotated(x, layer, rotation)  # type: ignore[arg-type]
        return self.out(x)


class LearnedRates(Rotated):
    """Gradients flow through the sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(1 / torch.arange(1.0, 1 + WIDTH // HEADS))

    def rotation(self, x: Tensor) -> Rotation:
        found = torch.arange(x.shape[1])[:, None] * self.rates
        return found.cos().to(x.dtype), found.sin().to(x.dtype)


class Predicted(Rotated):
    """Angles from a matmul, and their sines read by one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Linear(WIDTH, WIDTH // HEADS)

    def rotation(self, x: Tensor) -> Rotation:
        found = self.angles(x[0])
        return found.cos(), found.sin()


class OnAGrid(Rotated):
    """Positions in two dimensions; scaled; one of the two transposed in memory."""

    def rotation(self, x: Tensor) -> Rotation:
        rows, cols = (
            angles(LENGTH // 8, WIDTH // HEADS // 2)[:, None].expand(-1, 8, -1),
            angles(8, WIDTH // HEADS // 2)[None].expand(LENGTH // 8, -1, -1),
        )
        found = torch.cat([rows, cols], -1).flatten(0, 1)
        return (1.2 * found.cos()).to(x.dtype), (1.2 * found.t().contiguous().sin()).to(x.dtype).t()


class SummedAgain(Rotated):
    """What is made of many is summed to as few, and multiplied with the sines that it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(LENGTH, WIDTH, 16))

    def forward(self, x: Tensor) -> Tensor:
        sin = torch.sin(angles(LENGTH, WIDTH)).to(x.dtype)
        few = (self.many * sin[..., None]).sum(-1)
        return self.out(x + self.layers[0](few * sin)) + self.layers[1](few + sin)


class Checkpointed(Rotated):
    """Backward computes the angles again, and the layer; its regions wait for each other in a long line."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: self.rotated(x, layer, self.rotation(x)), x, use_reentrant=False)  # type: ignore[assignment]
        return self.out(x)


def operations(graph: str) -> Counter[str]:
    """How often regions compute what; `aten …` is what none does."""
    found = Counter(f"aten {name}" for name in re.findall(r"= (cos|sin)\(", graph))
    for start in re.finditer(r'\{"parts"', graph):
        region, _ = json.JSONDecoder().raw_decode(graph, start.start())
        found.update(v["op"] for part in region["parts"] for v in part["values"])
    return found


def compare(model: nn.Module, **options: str) -> None:
    """Run a step compiled, and see that FP8 alone is between its results and those of BF16: casts to e4m3 cost 31 dB
    each, gradients add up those of three layers."""
    x = torch.randn(4, LENGTH, WIDTH).bfloat16()
    expected = [model(x).detach(), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
    settings = {"executor": "eager", "select": "all", "strict": True, "save_min_bytes": 0, **options}
    y = torch.compile(model, backend="fp8", dynamic=False, options=settings)(x)
    got = [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]
    for mine, theirs in zip(got, expected, strict=True):
        assert sqnr(theirs, mine) > 20


@pytest.mark.parametrize("kind", [Rotated, LearnedRates, OnAGrid])
def test_angles_are_computed_once(kind: type[Rotated], tmp_path: Path) -> None:
    torch.manual_seed(0)
    compare(kind().bfloat16(), dump=str(tmp_path))
    for half in ("forward", "backward"):
        (graph,) = (tmp_path / "graph0").glob(f"*_{half}_combine_regions.txt")
        counts = operations(graph.read_text())
        assert counts["cos"] == counts["sin"] == 1, half
        assert not counts["aten cos"] + counts["aten sin"], half


@pytest.mark.parametrize("kind", [Predicted, SummedAgain, Checkpointed])
def test_repeated_values_among_others(kind: type[Rotated]) -> None:
    torch.manual_seed(0)
    compare(kind().bfloat16())


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
def test_without_casts_it_is_left_to_inductor() -> None:
    model, x = Rotated().bfloat16(), torch.randn(4, LENGTH, WIDTH).bfloat16()
    options = {"executor": "eager", "skip": ["*"], "strict": True}
    torch.compile(model, backend="fp8", dynamic=False, options=options)(x).sum().backward()
    assert not fp8compile.last_compile().kernels
