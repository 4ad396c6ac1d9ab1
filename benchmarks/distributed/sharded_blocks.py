"""Llama blocks that several GPUs share: sizes, weights that are the same for every system, how they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama import Block, LlamaConfig, Rotary

TINY = LlamaConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, hidden=128)


def eight_b(layers: int) -> LlamaConfig:
    """Blocks of Llama-8B."""
    return LlamaConfig(dim=4096, n_layers=layers, n_heads=32, n_kv_heads=8, hidden=14336, rope_base=500_000.0)


@dataclass(frozen=True)
class Size:
    """What is trained, on how much, for how long."""

    config: LlamaConfig
    batch: int
    length: int
    warmup: int
    steps: int
    device: str


class Blocks(nn.Module):
    """The blocks of a Llama, without embedding and head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        for block in self.blocks:
            x = block(x, rotary)
        return x


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device) -> None:
    """Give every system the same weights: values of a shard do not depend on what holds it."""
    for i, p in enumerate(model.parameters()):
        local = p.to_local()  # type: ignore[attr-defined]
        if p.dim() < 2:
            local.fill_(1.0)
            continue
        generator = torch.Generator(device).manual_seed(1000 * i + dist.get_rank())
        local.copy_(torch.randn(local.shape, generator=generator, device=device) * 0.02)


def compile_bf16(model: nn.Module, size: Size) -> None:
    compile_blocks(model, backend="inductor" if size.device == "cuda" else "eager")


def compile_fp8(model: nn.Module, size: Size, **options: Any) -> None:
    on_cpu = {"executor": "eager", "select": "all", "save_min_bytes": 0, "strict": True}
    compile_blocks(model, backend="fp8", options={**(on_cpu if size.device == "cpu" else {}), **options})


def compile_blocks(model: nn.Module, **how: Any) -> None:
    """Compile every block by itself."""
    assert isinstance(model, Blocks)
    for block in model.blocks:
        block.compile(**how)
