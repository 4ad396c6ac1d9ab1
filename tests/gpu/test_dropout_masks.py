"""Dropout on a GPU: what backward drops is what forward dropped, beside BF16 `torch.compile` of the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.gpu
LEAST = 12.0  # dB: other masks leave 3 dB or less


class Hidden(nn.Module):
    """Dropout between an activation function and a matmul, and in front of a residual sum."""

    def __init__(self, activation: Any, sequence_first: bool = False) -> None:
        super().__init__()
        self.activation, self.sequence_first = activation, sequence_first
        self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)
        self.last = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.activation(self.up(x)), 0.4)
        y = self.down(h)
        if self.sequence_first:
            y = functional.dropout(y.transpose(0, 1), 0.4).transpose(0, 1)
        else:
            y = functional.dropout(y, 0.4)
        return self.last(self.norm(x + y))


MODELS = {
    "relu": lambda: Hidden(functional.relu),
    "gelu": lambda: Hidden(functional.gelu),
    "sequence first": lambda: Hidden(functional.relu, sequence_first=True),
    "torch's layer": lambda: nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.4, batch_first=True),
    "torch's layer, pre-norm": lambda: nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.4, norm_first=True),
}


def gradients(model: nn.Module, x: Tensor, **how: Any) -> dict[str, Tensor]:
    """Gradients of a second step: of the parameters, and of the input."""
    torch.compiler.reset()
    run = torch.compile(model, **how)
    for seed in range(2):
        model.zero_grad(set_to_none=True)
        given = x.detach().clone().requires_grad_()
        torch.manual_seed(seed)
        out = run(given)
        (out * torch.linspace(-1, 1, out.shape[-1], device=x.device).to(out)).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert given.grad is not None
    return {**found, "input": given.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_backward_drops_what_forward_dropped(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().cuda().to(dtype), torch.randn(4, 96, 256, device="cuda", dtype=dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.float32):
        want = gradients(model, x)
        got = gradients(model, x, backend="fp8", options={"select": "all", "strict": True, "save_min_bytes": 0})
    assert got.keys() == want.keys()
    far = {name: s for name in want if want[name].dim() > 1 and (s := sqnr(want[name], got[name])) < LEAST}
    assert not far, far
