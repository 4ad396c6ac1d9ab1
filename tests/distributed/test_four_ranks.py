"""Two kinds of parallelism at once, on four ranks, against the parts of a batch one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharding import BF16, assert_as_alone, batch, compile_blocks, loss_of, make_model, train, train_alone
from sharding import Run as Result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from where import device_type

import fp8compile

PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.fixture
def four(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(4)


def assert_in_fp8() -> None:
    assert any(m.decision == "fp8" for plan in fp8compile.compiles() for m in plan.matmuls)


def train_part(model: nn.Module, part: int, parts: int, steps: int = 2) -> Result:
    """Train this rank's part of every batch; losses are averaged over all ranks."""

    def step(i: int) -> Tensor:
        tokens, targets = (x.chunk(parts)[part] for x in batch(i))
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss

    return train(model, step, torch.optim.AdamW(model.parameters(), lr=1e-2), steps)


def alone(parts: int) -> Result:
    return train_alone(make_model(layers=1), compile_blocks, parts=parts)


def hsdp(rank: int) -> None:
    """Shards within pairs of ranks, copies between them; both ranks of a pair train the same part."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = compile_blocks(make_model(layers=1))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    run = train_part(model, rank // 2, 2)
    assert_in_fp8()
    assert_as_alone(run, lambda: alone(2), 1e-3, 0.02)


def tensor_and_data_parallel(rank: int) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("data", "tensor"))
    model = make_model(layers=1)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    compile_blocks(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=BF16)
    fully_shard(model, mesh=mesh["data"], mp_policy=BF16)
    run = train_part(model, mesh["data"].get_local_rank(), 2)
    assert_in_fp8()
    # casts of halves of weights and activations have scales of their own: other roundings of FP8
    assert_as_alone(run, lambda: alone(2), 0.03, 0.2)


@pytest.mark.parametrize("case", [hsdp, tensor_and_data_parallel], ids=lambda case: case.__name__)
def test_as_one_process(four: Ranks, case: Any) -> None:
    four.run(case, group=__name__)
