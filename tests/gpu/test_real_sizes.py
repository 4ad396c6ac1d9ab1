"""Models at the sizes that people train, where tiles are what they are not in small ones: that they compile at all, in
minutes, and that gradients are those of BF16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from torch import Tensor, nn

import diffusion
from llama import Block, LlamaConfig, Rotary

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
LEAST = 12.0  # dB; of what is above 25 in BF16


class OneBlock(nn.Module):
    """A decoder block of a 1B model, and a loss."""

    def __init__(self, length: int = 2048) -> None:
        super().__init__()
        self.block = Block(LlamaConfig(dim=2048, n_layers=1, n_heads=16, n_kv_heads=4, hidden=5632))
        self.rotary = Rotary(128, length, 10_000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.rotary).float().tanh().square().mean()


class Parallel(nn.Module):
    """Two layers whose outputs are added up, as where attention and MLP stand side by side: their biases have the same
    gradient, which one kernel sums up for both."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.down, self.out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(F.gelu(self.up(h))) + self.out(self.gate(h).tanh())
        return x.float().tanh().square().mean()


def dit(images: int = 8, pixels: int = 128) -> tuple[nn.Module, dict[str, Tensor]]:
    """Each image scales and shifts all of its rows. What begins as zero in adaLN would have no gradients below it."""
    torch.manual_seed(0)
    model = diffusion.DiT(768, 2, 12, pixels, 4)
    for block in model.blocks:
        nn.init.normal_(block.modulation.weight, std=0.02)  # type: ignore[union-attr, arg-type]
    return model, diffusion.batch(torch.Generator().manual_seed(1), images, pixels)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return OneBlock(), {"x": torch.randn(2, 2048, 2048)}


def parallel(tokens: int = 4096, width: int = 2048) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Parallel(width), {"x": torch.randn(tokens, width)}


def gradients(model: nn.Module, run: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """By name, of a step under autocast to `dtype` (FP32: without)."""
    model.zero_grad()
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype if dtype != torch.float32 else torch.bfloat16, enabled=dtype != torch.float32):
        loss = run(**batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(made: tuple[nn.Module, dict[str, Tensor]], device: str, **options: Any) -> None:
    torch.compiler.reset()
    model, batch = made[0].to(device), {name: x.to(device) for name, x in made[1].items()}
    exact = gradients(model, model, batch, torch.float32)
    plain = gradients(model, model, batch, torch.bfloat16)
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, **options})
    ours = gradients(model, run, batch, torch.bfloat16)
    near = {name: sqnr(exact[name], ours[name]) for name in exact if sqnr(exact[name], plain[name]) > 25}
    assert len(near) > len(exact) // 2
    assert min(near.values()) > LEAST, sorted(near.items(), key=lambda item: item[1])[:3]


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("make", [dit, llama, parallel], ids=["dit", "llama", "parallel"])
def test_gradients_at_real_sizes(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], recipe: str) -> None:
    check(make(), "cuda", recipe=recipe)
