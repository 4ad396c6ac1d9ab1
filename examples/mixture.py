"""A mixture of experts over bytes, as anyone would write it: the Llama of `llama.py`, its feed-forward layers experts.

    x ─► router ─► its top_k experts, weighted ─► tokens sorted by expert ─► two grouped matmuls ─► sorted back, added

In training the loss has a term for balance (Switch Transformers, arXiv 2101.03961): else few experts get all tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama import VOCABULARY, Block, Llama, LlamaConfig, Rotary

BALANCE = 0.01


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes of the model. `hidden` is that of one expert."""

    experts: int = 8
    top_k: int = 2

    def built(self, max_seq: int, vocabulary: int = VOCABULARY) -> nn.Module:
        return Mixture(self, max_seq, vocabulary)


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) of the experts that the router chooses for a token, weighted and added."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.experts, self.top_k = config.experts, config.top_k
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.dim))
        self.down = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, seq, dim]; returns as much, and how unevenly tokens are spread: f32[], 1 if they are evenly."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        shares, chosen = scores.topk(self.top_k)
        shares = shares / shares.sum(-1, keepdim=True)
        met = (chosen[..., None] == torch.arange(self.experts, device=x.device)).sum((0, 1))
        balance = self.experts * torch.dot(met / chosen.numel(), scores.mean(0))

        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=x.device)
        ends = met.cumsum(0).int()
        gate, up = self._each(tokens[order // self.top_k], self.gate_up, ends).chunk(2, -1)
        found = self._each(F.silu(gate) * up, self.down, ends)[inverse]
        weighted = found.unflatten(0, (-1, self.top_k)) * shares[..., None].to(x.dtype)
        return weighted.sum(1).to(x.dtype).view_as(x), balance  # autocast sums in FP32 on CUDA

    def _each(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.to(x.dtype).mT, offs=ends)


class MixtureBlock(Block):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.mlp = Experts(config)

    def forward(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotary)
        made, balance = self.mlp(self.mlp_norm(x))
        return x + made, balance


class Mixture(Llama):
    """The whole model; forward returns the mean cross-entropy, f32[], in training with the term for balance."""

    block = MixtureBlock

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        balances = []
        for block in self.blocks:
            x, balance = block(x, self.rotary)
            balances.append(balance)
        loss = self.loss(x, targets)
        return loss + BALANCE * torch.stack(balances).mean() if torch.is_grad_enabled() else loss
