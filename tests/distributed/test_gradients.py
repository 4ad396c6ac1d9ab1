"""Gradients exchanged in FP8: how far they lie from exact ones, and what error feedback gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from sharding import compile_blocks, local_batch, loss_of, make_model, shard, train_sharded
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from where import seeded

import fp8compile
from fp8compile.distributed.gradients import pack, unpack

# Rounded once to E4M3 (relative error uniform up to 2⁻⁴, RMS 2⁻⁴ / √3 at the lower end of a binade, less above it):
# about 2.6 % of the norm; E5M2 twice that. DDP rounds the mean once more: √2 times as much at most.
ERROR = {"e4m3": 0.03, "e5m2": 0.06}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


class Vector(nn.Module):
    """Parameters whose gradients are what they are multiplied with: known exactly, of very different magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(300), torch.zeros(40, 33), torch.zeros(1), torch.zeros(128)])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parts, gradients, strict=True)]).sum()


def gradients_of(rank: int, step: int = 0) -> list[Tensor]:
    generator = seeded(17 * step + rank)
    return [
        torch.randn(p.shape, generator=generator) * 10.0**-i for i, p in enumerate(Vector().parts)
    ]  # fmt: skip


def mean_of(step: int = 0) -> Tensor:
    both = [torch.cat([g.flatten() for g in gradients_of(rank, step)]) for rank in range(2)]
    return (both[0] + both[1]) / 2


def exchanged(model: nn.Module, gradients: list[Tensor]) -> Tensor:
    model.zero_grad()
    model(gradients).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def ddp(rank: int, format: str) -> None:
    model = fp8compile.compress_gradients(DistributedDataParallel(Vector(), bucket_cap_mb=0.002), format)
    for step in range(3):  # buckets are rebuilt after the first
        found = exchanged(model, gradients_of(rank, step))
        assert 0.3 * ERROR[format] < relative(found, mean_of(step)) < 1.42 * ERROR[format]
        other = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(other, found)
        assert torch.equal(other[0], other[1]), "ranks differ"


def fed_back(rank: int, format: str) -> None:
    """The same gradient 32 times: the mean of what arrives is the gradient, 32 times closer than one rounding is."""
    steps, errors = 32, {}
    for feedback in (False, True):
        model = fp8compile.compress_gradients(
            DistributedDataParallel(Vector()), format, error_feedback=feedback
        )  # fmt: skip
        total = sum(exchanged(model, gradients_of(rank)) for _ in range(steps + 1)) - 0.0
        errors[feedback] = relative(total / (steps + 1), mean_of())
    assert errors[False] > 0.3 * ERROR[format]
    assert errors[True] < 4 * ERROR[format] / steps, errors


class Reordered(nn.Module):
    """Two parameters in a bucket, which DDP makes anew after the first step: gradients come in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(96, 64)), nn.Parameter(torch.zeros(64, 128))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        first = (self.a * gradients[0]).sum()
        return first + (self.b * gradients[1]).sum()


def rebuilt(rank: int, format: str) -> None:
    """What rounding has taken from one parameter's large gradient is not added to the other's small one."""
    model = fp8compile.compress_gradients(DistributedDataParallel(Reordered()), format, error_feedback=True)
    for step in range(4):
        generator = seeded(step)
        given = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        given[1] *= 1e-6
        exchanged(model, given)
        for p, wanted in zip(model.parameters(), given, strict=True):
            assert relative(p.grad, wanted) < 2.5 * ERROR[format], (step, p.shape)


def sharded(rank: int, format: str) -> None:
    plain = train_sharded(shard(compile_blocks(make_model())), steps=1)
    model = fp8compile.compress_gradients(shard(compile_blocks(make_model())), format)
    run = train_sharded(model, steps=1)
    assert run.losses == plain.losses
    for name, gradient in plain.gradients.items():
        # two roundings, of this and of the other rank's gradient, which partly cancel in the mean
        assert 0 < relative(run.gradients[name], gradient) < 2 * ERROR[format], name
    comms = {m._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm for m in model.modules()
             if isinstance(m, FSDPModule)}  # fmt: skip
    elements = sum(-(-p.shape[0] // 2) * 2 * (p.numel() // p.shape[0]) for p in model.parameters())
    sent = sum(comm.sent for comm in comms)
    assert elements * (1 + 1 / 32) <= sent < elements * (1 + 1 / 32) + 3 * 2 * 132  # padding of each group's end


def overflow(rank: int, format: str) -> None:
    model = fp8compile.compress_gradients(DistributedDataParallel(Vector()), format, error_feedback=True)
    gradients = gradients_of(rank)
    if rank == 1:
        gradients[1][3, 3] = torch.inf
    assert not exchanged(model, gradients).isfinite().all()
    assert exchanged(model, gradients_of(rank)).isfinite().all(), "an overflow must not stay in the feedback"


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", [ddp, fed_back, rebuilt, sharded, overflow])
def test_exchange(ranks: Ranks, case: Any, format: str) -> None:
    ranks.run(case, format, group=__name__)


def errors(rank: int) -> None:
    with pytest.raises(fp8compile.OptionError, match="nothing to do"):
        fp8compile.compress_gradients(Vector())
    with pytest.raises(fp8compile.OptionError, match="unknown format 'fp8'"):
        fp8compile.compress_gradients(Vector(), "fp8")
    model = shard(make_model())
    with pytest.raises(fp8compile.OptionError, match="it is for DDP"):
        fp8compile.compress_gradients(model, error_feedback=True)
    fp8compile.compress_gradients(model).blocks[0].set_gradient_divide_factor(3.0)
    tokens, targets = local_batch(0)
    loss = loss_of(model(tokens), targets)
    with pytest.raises(fp8compile.ShardingError, match="set_force_sum_reduction_for_comms"):
        loss.backward()


def test_errors(ranks: Ranks) -> None:
    ranks.run(errors)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_packing(format: str) -> None:
    x = torch.randn(3, 384) * torch.exp(4 * torch.randn(3, 384))
    packed = pack(x, format)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 384 + 384 // 32)
    back = unpack(packed, format)
    groups = x.view(-1, 128).abs().amax(1, keepdim=True)
    bits = 2.0**-4 if format == "e4m3" else 2.0**-3
    tiny = groups / (448 * 2**10 if format == "e4m3" else 57344 * 2**17)  # half the step below the least normal number
    assert ((back - x).view(-1, 128).abs() <= x.view(-1, 128).abs() * bits + tiny * 1.01).all()
    assert F.cosine_similarity(back.flatten(), x.flatten(), 0) > 0.99
