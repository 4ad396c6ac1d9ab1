"""Tensor parallel, by DTensor: sharded linears compile with FP8, alone and under FSDP2's sharding of activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from sharding import Block, assert_close, backend
from sharding import Run as Result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from where import device_type, seeded

import fp8compile

PLAIN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def make() -> Block:
    torch.manual_seed(5)
    return Block(64, 128).bfloat16()


def run(block: nn.Module, call: Any, x: Tensor) -> Result:
    """One step; gradients as they are without sharding."""
    out = call(x)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    loss = out.float().square().mean()
    loss.backward()
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).float()
        for name, p in block.named_parameters()
    }
    return Result([float(loss)], gradients)


def in_one_process() -> Result:
    """BF16, without FP8 and without sharding."""
    block = make()
    return run(block, block, inputs())


def inputs() -> Tensor:
    generator = seeded(2)
    return torch.randn(2, 16, 64, generator=generator).bfloat16().requires_grad_()


def parallel(rank: int) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    block = parallelize_module(make(), mesh, PLAIN)
    result = run(block, torch.compile(block, backend=backend()), inputs())
    plans = [m for plan in fp8compile.compiles() for m in plan.matmuls]
    assert [m.decision for m in plans].count("fp8") == len(plans) > 0
    sizes = {(m.role, m.n, m.k) for m in plans}
    assert ("output", 64, 64) in sizes or ("output", 128, 64) in sizes, sizes  # a half of 128 columns, or both merged
    # gradients differ from BF16 by what FP8 costs: a relative error of 2⁻⁴ an element at most, 0.08 to 0.12 in all
    assert_close(result, in_one_process(), 0.02, 0.15)


def sequence_parallel(rank: int) -> None:
    """Activations sharded along the sequence around the norm; gathered for the linears."""
    mesh = init_device_mesh(device_type(), (2,))
    how = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    block = parallelize_module(make(), mesh, how)
    x = inputs()
    local = DTensor.from_local(x.detach().chunk(2, 1)[rank], mesh, [Shard(1)]).requires_grad_()
    result = run(block, torch.compile(block, backend=backend()), local)
    assert [m for plan in fp8compile.compiles() for m in plan.matmuls if m.decision == "fp8"]
    assert_close(result, in_one_process(), 0.02, 0.15)


class Classifier(nn.Module):
    """A block, and a head over a vocabulary; returns logits, or with targets their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.lm_head = make(), nn.Linear(64, 96, bias=False).bfloat16()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.block(x)).flatten(0, 1)
        return logits if targets is None else F.cross_entropy(logits.float(), targets)


def classified(model: nn.Module, call: Any, inside: bool) -> Result:
    """One step; the loss is computed within what is compiled, or outside."""
    torch.manual_seed(3)
    x, targets = inputs(), torch.randint(96, (32,))
    if inside:
        loss = call(x, targets)
    else:
        logits = call(x)
        assert not isinstance(logits, DTensor) or logits.to_local().shape == (32, 48)
        loss = F.cross_entropy(logits.float(), targets)
    loss.backward()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    named = {name: p.grad for name, p in model.named_parameters()}
    return Result(
        [float(loss)], {n: (g.full_tensor() if isinstance(g, DTensor) else g).float() for n, g in named.items()}
    )


def parallel_loss(rank: int, inside: bool) -> None:
    """Logits stay sharded along the vocabulary; no rank has all of them."""
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(4)
    model = Classifier()
    exact = copy.deepcopy(model)
    parallelize_module(model.block, mesh, PLAIN)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"lm_head": head})
    with loss_parallel():
        result = classified(model, torch.compile(model, backend=backend()), inside)
    assert [m for plan in fp8compile.compiles() for m in plan.matmuls if m.decision == "fp8"]
    assert_close(result, classified(exact, exact, inside), 0.02, 0.15)


@pytest.mark.parametrize("inside", [False, True])
def test_loss_parallel(ranks: Ranks, inside: bool) -> None:
    ranks.run(parallel_loss, inside)


@pytest.mark.parametrize("case", [parallel, sequence_parallel], ids=lambda case: case.__name__)
def test_tensor_parallel(ranks: Ranks, case: Any) -> None:
    ranks.run(case)
