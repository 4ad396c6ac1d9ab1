"""A Llama-style language model over bytes, as anyone would write it: nothing here knows about FP8.

    tokens ─► embedding ─► n_layers × [ x + attention(norm(x)),  x + swiglu(norm(x)) ] ─► norm ─► lm_head ─► loss

Parameters are FP32 and the residual stream is BF16. Train it under `torch.autocast(device, torch.bfloat16)`, which
runs the matmuls and the attention in BF16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. `dim` and `hidden` are multiples of 128, which suits FP8 tiles and scale groups."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden: int
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def built(self, max_seq: int, vocabulary: int = VOCABULARY) -> nn.Module:
        """Return a model of these sizes, which gives the loss of (tokens, targets)."""
        return Llama(self, max_seq, vocabulary)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, computed in FP32, returned in x's type."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class Rotary(nn.Module):
    """Rotary positions: turns the two halves of every head by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq: int, base: float) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(max_seq).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, heads, seq, head_dim]."""
        seq = x.shape[-2]
        cos, sin = self.cos[:seq], self.sin[:seq]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_dim = config.n_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.shares_kv = config.n_kv_heads != config.n_heads
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (self._heads(projection(x)) for projection in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=self.shares_kv)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The whole model; forward returns the mean cross-entropy in nats per token, f32[]. Tokens are bytes by default."""

    block: Callable[..., nn.Module] = Block

    def __init__(self, config: LlamaConfig, max_seq: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.rotary = Rotary(config.head_dim, max_seq, config.rope_base)
        self.blocks = nn.ModuleList(type(self).block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, vocabulary, bias=False)
        self._initialise(config.n_layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of what the blocks made."""
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialise(self, n_layers: int) -> None:
        """Normal(0, 0.02), with the layers that write to the residual stream shrunk by sqrt(2 n_layers) as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                writes_residual = name.endswith(("out.weight", "down.weight", "down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layers) if writes_residual else 0.02)
