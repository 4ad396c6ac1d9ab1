"""Two decoder blocks of known models, and what one forward and backward of them takes: memory, gradients.

Decoder blocks without embedding and head are most of what a large model does, and fit on any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.measuring import GIB
from llama import Block, LlamaConfig, Rotary

LAYERS = 2
LLAMA_8B = LlamaConfig(dim=4096, n_layers=LAYERS, n_heads=32, n_kv_heads=8, hidden=14336, rope_base=500_000.0)
LLAMA_1B = LlamaConfig(dim=2048, n_layers=LAYERS, n_heads=32, n_kv_heads=8, hidden=8192, rope_base=500_000.0)
LLAMA_2_7B = LlamaConfig(dim=4096, n_layers=LAYERS, n_heads=32, n_kv_heads=32, hidden=11008)
LLAMA_13B = LlamaConfig(dim=5120, n_layers=LAYERS, n_heads=40, n_kv_heads=40, hidden=13824)
TINY = LlamaConfig(dim=128, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden=256)


class Blocks(nn.Module):
    """Decoder blocks of a Llama, called with [batch, length, dim]."""

    def __init__(self, config: LlamaConfig = LLAMA_8B, length: int = 4096, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.rotary = Rotary(config.head_dim, length, config.rope_base)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, self.rotary, use_reentrant=False) if self.checkpointed else block(x, self.rotary)  # type: ignore[assignment]
        return x


class GPT2Blocks(nn.Module):
    """Blocks of Hugging Face's GPT-2, without dropout, so that gradients compare."""

    def __init__(self, width: int = 1600, heads: int = 25, layers: int = LAYERS) -> None:
        super().__init__()
        transformers = import_module("transformers")
        config = transformers.GPT2Config(n_embd=width, n_head=heads, n_layer=layers, attn_pdrop=0, resid_pdrop=0)
        config._attn_implementation = "sdpa"
        block = transformers.models.gpt2.modeling_gpt2.GPT2Block
        self.blocks = nn.ModuleList(block(config, layer_idx=i) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


@dataclass(frozen=True)
class Size:
    """A model of two blocks, and the activations that go through it; both also tiny."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    build_tiny: Callable[[], nn.Module]

    def made(self, device: str, tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
        """(the model in BF16, its input, the gradient of its output): the same at every call."""
        torch.manual_seed(0)
        with torch.device(device):
            model = (self.build_tiny if tiny else self.build)().bfloat16().train()
            shape = (2, 32, 128) if tiny else self.shape
            x = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
        return model, x, torch.randn_like(x)


def llama(name: str, config: LlamaConfig, batch: int, length: int) -> Size:
    return Size(name, lambda: Blocks(config, length), (batch, length, config.dim), lambda: Blocks(TINY, 32))


SIZES = (
    llama("Llama-8B", LLAMA_8B, 4, 4096),
    llama("Llama-1B", LLAMA_1B, 8, 2048),
    llama("Llama-13B", LLAMA_13B, 4, 4096),
    Size("GPT-2 XL", GPT2Blocks, (8, 1024, 1600), lambda: GPT2Blocks(128, 4)),
)


# ---- one forward and backward ---------------------------------------------------------------------------------------


def step(run: Any, model: nn.Module, x: Tensor, gradient: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    x.grad = None
    run(x).backward(gradient)


def memory(run: Any, model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    """GiB a block held between forward and backward, and GiB at most, beyond weights, gradients and data."""
    model.zero_grad(set_to_none=False)
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run(x)
    held = torch.cuda.memory_allocated() - before - out.numel() * out.itemsize
    out.backward(gradient)
    torch.cuda.synchronize()
    return held / GIB / LAYERS, (torch.cuda.max_memory_allocated() - before) / GIB


def gradients(run: Any, model: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Gradients of the parameters, by name, in FP32."""
    step(run, model, x, gradient)
    return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Cosine and relative error of each gradient."""
    result = {}
    for name, a in expected.items():
        a, b = a.flatten(), found[name].flatten()
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        result[name] = (cosine, ((a - b).norm() / a.norm()).item())
    return result
