"""What a convolution leaves transposed is copied once, where rows are reduced; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from pipelines import look_after_stage
from torch import Tensor, fx, nn

from fp8compile.kernels.codegen.spec.region import ELEMENT
from fp8compile.passes.core.compilation import STANDS_ALONE
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.passes.regions.sum_pieces import adds_pieces


class Patches(nn.Module):
    """As a vision tower without a class token begins: patches, positions, blocks with a norm."""

    def __init__(self, width: int = 128, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(64, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x.square().mean()


class Mixer(nn.Module):
    """Tokens are mixed by a layer whose output comes back transposed."""

    def __init__(self, tokens: int = 64, width: int = 160) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.first, self.layer = nn.Linear(width, width), nn.Linear(width, width)
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.mix(self.before(x).transpose(1, 2)).transpose(1, 2)
        return self.layer(self.after(x)).square().mean()


class Gated(nn.Module):
    """As in a state space model: a convolution over time, whose output is gated and goes into a layer; no norm."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.wide, self.layer = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.wide(x).chunk(2, -1)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.layer(F.silu(x) * gate).square().mean()


class Plain(nn.Module):
    """What is reduced here is no row: all pixels of some channels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv, self.norm, self.layer = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.Linear(128, 32)

    def forward(self, images: Tensor) -> Tensor:
        images = images.transpose(2, 3)
        return self.layer(F.relu(self.norm(self.conv(images)))).square().mean()


OPTIONS = {"executor": "eager", "select": "all", "strict": True, "operations": ["linear"]}


def step(model: nn.Module, x: Tensor, compiled: bool = True, **how: Any) -> dict[str, Tensor]:
    """Gradients of a step under autocast."""
    torch.compiler.reset()
    model.zero_grad()
    run = torch.compile(model, backend="fp8", options=OPTIONS, **how) if compiled else model
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(x)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def copies(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if STANDS_ALONE in n.meta]


@pytest.fixture
def strided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What regions read that does not lie in rows."""
    found: list[str] = []

    def look(c: HalfGraph) -> None:
        for region in (spec_of(node)[0] for node in regions_of(c.graph)):
            for part in () if adds_pieces(region) else region.parts:
                found.extend(str(i) for i in part.inputs if i.extent == ELEMENT and i.cols[-1][1] not in (0, 1))

    look_after_stage(monkeypatch, Stage.HALF, look)
    return found


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "patches": (Patches, (8, 3, 32, 32), 1),
    "mixer": (Mixer, (8, 64, 160), 2),  # forward, and the gradient on its way back
    "gated": (Gated, (2, 32, 192), 1),
    "plain": (Plain, (4, 3, 128, 16), 0),
    "short": (lambda: Patches(64), (8, 3, 32, 32), 0),
}


@pytest.mark.parametrize(("case", "dynamic"), [(case, case == "gated") for case in CASES])
def test_copied_once_and_read_in_rows(case: str, dynamic: bool, graphs: list[fx.Graph], strided: list[str]) -> None:
    build, shape, count = CASES[case]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    expected = step(model, x, compiled=False)
    actual = step(model, x, dynamic=dynamic)
    assert len(copies(graphs[0])) == count
    assert case in ("mixer", "short") or not strided  # rows of 64, which tiles hold 16 of
    for name, gradient in expected.items():
        assert sqnr(gradient, actual[name]) > 14 or name == "mix.bias", name  # what the norm behind it takes away


def test_an_output_keeps_its_strides(graphs: list[fx.Graph]) -> None:
    """The user gets what eager gives, in its layout; kernels read the copy."""

    class Both(Patches):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(images).flatten(2).transpose(1, 2)
            return x, self.layers[0](self.norms[0](x)).square().mean()

    model, images = Both(), torch.randn(8, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        x, _ = torch.compile(model, backend="fp8", options=OPTIONS)(images)
        y, _ = model(images)
    assert len(copies(graphs[0])) == 1
    assert x.stride() == y.stride()
    assert sqnr(y, x) > 20
