"""Inductor's pad_mm, which on a GPU pads matmuls of odd sizes before the cut: a view then reads a slice of what the
padded matmul wrote, whose strides allow no view."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm


class Attention(nn.Module):
    """One head over an odd number of tokens, with a bias for each pair of them."""

    def __init__(self, width: int = 32, tokens: int = 33) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(0.1 * torch.randn(1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (1, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + self.bias[None]
        weights = F.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Pad all matmuls of odd sizes, on a CPU as well; return whether each was."""
    decided: list[bool] = []
    decide = pad_mm.should_pad

    def note(*args, **kwargs):
        decided.append(decide(*args, **kwargs))
        return decided[-1]

    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(pad_mm, "should_pad", note)
    with config.patch(force_shape_pad=True):
        yield decided


@pytest.mark.filterwarnings("error::fp8compile.errors.Fp8Warning")
def test_gradients_where_inductor_pads(padded: list[bool]) -> None:
    model = Attention().bfloat16()
    x = torch.randn(7, 33, 32, dtype=torch.bfloat16, requires_grad=True)
    torch.compiler.reset()
    options = {"select": "all", "strict": True, "executor": "eager"}  # all that pads has run before the cut
    compiled = torch.compile(model, backend="fp8", options=options)
    found = []
    for run in (model, compiled):
        y = run(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])])
    assert any(padded)
    for expected, y in zip(*found, strict=True):
        assert y.stride() == expected.stride()
        assert sqnr(expected, y) > 15
