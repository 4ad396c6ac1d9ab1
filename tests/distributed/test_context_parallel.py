"""Context parallelism: each rank has a piece of every sequence, and attention sees the keys and values of all pieces.

Keys and values are gathered within the compiled model, or sent round a ring by an operator of the user's own. Either
way the gradients of parameters, summed over ranks, are those of one process that has the whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # as torch's own context parallelism gathers
import torch.nn.functional as F
from ranks import Ranks
from sharding import Block, backend
from torch import Tensor, nn
from where import seeded

import fp8compile

DIM, HEADS, LENGTH, BATCH, LAYERS = 64, 2, 32, 2, 2
Gather = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Causal self-attention over a piece of the sequence; `gather` makes the keys, and values, of the whole one."""

    def __init__(self, gather: Gather, start: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gather, self.start = gather, start

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = self.gather(k), self.gather(v)
        mine = torch.arange(q.shape[-2]) + self.start
        seen = torch.arange(k.shape[-2]) <= mine[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


def model_of(gather: Gather, start: int) -> nn.Module:
    """Return the same blocks of attention and SwiGLU in every process, in BF16."""
    torch.manual_seed(11)
    layers = [layer for _ in range(LAYERS) for layer in (Attention(gather, start), Block(DIM, 2 * DIM))]
    return nn.Sequential(*layers).bfloat16()


def sequences() -> tuple[Tensor, Tensor]:
    """Return inputs and targets, bf16[BATCH, LENGTH, DIM]."""
    generator = seeded(5)
    x, target = torch.randn(2, BATCH, LENGTH, DIM, generator=generator).bfloat16()
    return x, target


def step(model: nn.Module, call: Any, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss summed over tokens, f32[], and gradients, of a second step on the same batch."""
    for _ in range(2):  # the first has compiled
        model.zero_grad()
        loss = (call(x) - target).float().square().mean(-1).sum()
        loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def whole(compiled: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of one process with whole sequences."""
    model = model_of(lambda x: x, 0)
    return step(model, torch.compile(model, backend=backend()) if compiled else model, *sequences())


def gathered(x: Tensor) -> Tensor:
    """Gather keys or values [batch, heads, piece, head] along the sequence; backward scatters sums."""
    return collectives.all_gather_tensor_autograd(x.contiguous(), 2, dist.group.WORLD)


class Ring(torch.autograd.Function):
    """The same by neighbours: pieces travel round, and so do their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pieces: list[Tensor] = [x] * dist.get_world_size()
        rank, world = dist.get_rank(), dist.get_world_size()
        for turn in range(1, world):
            pieces[(rank - turn) % world] = _passed_on(pieces[(rank - turn + 1) % world])
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        pieces = list(gradient.chunk(world, 2))
        total = pieces[(rank - 1) % world]
        for turn in range(2, world + 1):
            total = _passed_on(total) + pieces[(rank - turn) % world]
        return total.contiguous()


def _passed_on(x: Tensor) -> Tensor:
    """Send `x` to the next rank and return what the one before has sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    wait = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ])  # fmt: skip
    for each in wait:
        each.wait()
    return received


@torch.compiler.disable
def ringed(x: Tensor) -> Tensor:
    return Ring.apply(x)


def piece_of(rank: int, how: str) -> tuple[float, dict[str, Tensor], list[str]]:
    """Train this rank's piece of all sequences; gradients are summed over ranks."""
    world = dist.get_world_size()
    start = rank * LENGTH // world
    model = model_of({"gathered": gathered, "ring": ringed}[how], start)
    x, target = (each[:, start : start + LENGTH // world].contiguous() for each in sequences())
    before = len(fp8compile.compiles())
    loss, gradients = step(model, torch.compile(model, backend=backend()), x, target)
    for each in (loss, *gradients.values()):
        dist.all_reduce(each)
    plans = fp8compile.compiles()[before:]
    return float(loss), gradients, [m.decision for plan in plans if plan.graph == "training" for m in plan.matmuls]


@pytest.mark.parametrize("how", ["gathered", "ring"])
def test_gradients_are_those_of_whole_sequences(ranks: Ranks, how: str) -> None:
    (loss, gradients, decisions), (other_loss, others, _) = ranks.run(piece_of, how, group=__name__)
    assert loss == other_loss
    assert decisions.count("fp8") == len(decisions) > 0
    (exact_loss, exact), (alone_loss, alone) = whole(False), whole(True)
    assert loss == pytest.approx(float(exact_loss), rel=0.01)
    assert gradients.keys() == exact.keys()
    for name, want in exact.items():
        assert torch.equal(gradients[name], others[name]), name
        error = (gradients[name] - want).norm() / want.norm()
        error_alone = (alone[name] - want).norm() / want.norm()
        assert error < 1.3 * error_alone + 0.01, (name, float(error), float(error_alone))
    assert loss == pytest.approx(float(alone_loss), rel=0.002)
