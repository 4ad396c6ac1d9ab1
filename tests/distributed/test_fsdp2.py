"""FSDP2 around compiled blocks: losses and gradients are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharding import (
    Model,
    Run,
    assert_as_alone,
    backend,
    batch,
    compile_blocks,
    local_batch,
    loss_of,
    make_model,
    shard,
    train,
    train_alone,
    train_sharded,
)
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from where import device_type

import fp8compile
from fp8compile import process_state

# Gradients of a rank are rounded to BF16 (2⁻⁹) before they are averaged in FP32, on both sides alike; what is left is
# the order of additions in FP32, which may flip a rounding of the next step.
LOSS, GRADIENT = 1e-4, 2**-8
ONE = {"layers": 1}  # compiling takes most of the time; two blocks are where one is gathered while another runs
FULL = MixedPrecisionPolicy()


@functools.cache
def in_one_process(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Run:
    """Blocks compiled in one process: what most cases are compared with, trained once."""
    run = train_alone(make_model(**sizes), compile_blocks, dtype)
    assert_in_fp8()
    return run


def assert_in_fp8() -> None:
    plan = fp8compile.last_compile()
    assert plan is not None
    assert all(m.decision == "fp8" for m in plan.matmuls)


def by_blocks(rank: int) -> None:
    process_state.reset()  # the plan is looked at
    run = train_sharded(shard(compile_blocks(make_model())))
    assert_in_fp8()
    assert_as_alone(run, in_one_process, LOSS, GRADIENT)


def whole(rank: int) -> None:
    process_state.reset()  # Dynamo leaves alone what it could not compile before
    model = shard(make_model())
    run = train_sharded(model, call=torch.compile(model, backend=backend()))
    reference = lambda: train_alone(make_model(), lambda m: torch.compile(m, backend=backend()))  # noqa: E731
    assert_as_alone(run, reference, LOSS, GRADIENT)


def in_fp32(rank: int) -> None:
    run = train_sharded(shard(compile_blocks(make_model(**ONE)), FULL))
    assert_as_alone(run, lambda: in_one_process(torch.float32, **ONE), 1e-5, 1e-4)


def kept_unsharded(rank: int) -> None:
    run = train_sharded(shard(compile_blocks(make_model()), reshard_after_forward=False))
    assert_as_alone(run, in_one_process, LOSS, GRADIENT)


def accumulated(rank: int) -> None:
    """Two batches before gradients are reduced: of the sum."""
    model = shard(compile_blocks(make_model()), MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def step(i: int) -> Tensor:
        total = torch.zeros(())
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            tokens, targets = local_batch(2 * i + half)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            total += loss.detach()
        return total

    run = train(model, step, torch.optim.SGD(model.parameters(), lr=0.1), 2)

    alone, master = make_model().to(torch.bfloat16), make_model()

    def reference_step(i: int) -> Tensor:
        total = torch.zeros(())
        with torch.no_grad():
            for p, w in zip(master.parameters(), alone.parameters(), strict=True):
                w.copy_(p)
        for half in range(2):
            tokens, targets = batch(2 * i + half)
            for t, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
                loss = loss_of(alone(t), y)
                loss.backward()
                total += loss.detach() / 2
                for p, w in zip(master.parameters(), alone.parameters(), strict=True):
                    assert w.grad is not None
                    p.grad = w.grad.float() / 2 + (0 if p.grad is None else p.grad)
                    w.grad = None
        return total

    def reference() -> Run:
        compile_blocks(alone)
        return train(master, reference_step, torch.optim.SGD(master.parameters(), lr=0.1), 2)

    assert_as_alone(run, reference, LOSS, GRADIENT)


def checkpointed(rank: int) -> None:
    """Activation checkpointing around each block, inside what is compiled, as torchtitan does it."""

    def prepared(model: Model) -> Model:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return compile_blocks(model)

    run = train_sharded(shard(prepared(make_model(**ONE))))
    reference = lambda: train_alone(make_model(**ONE), prepared)  # noqa: E731
    run.gradients = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in run.gradients.items()}
    assert_as_alone(run, reference, LOSS, GRADIENT)


def from_meta(rank: int) -> None:
    """Made on the meta device, sharded, and only then given memory and values."""
    source = make_model(**ONE)
    with torch.device("meta"):
        model = Model(**ONE)
    model = shard(compile_blocks(model))
    model.to_empty(device=device_type())
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), source.parameters(), strict=True):
            assert isinstance(p, DTensor), name
            local = q.chunk(2)[rank]
            p.to_local().copy_(local)
    assert_as_alone(train_sharded(model), lambda: in_one_process(**ONE), LOSS, GRADIENT)


def uneven(rank: int) -> None:
    """Rows that two ranks cannot share alike, and one row that only the first has; K that needs padding."""
    run = train_sharded(shard(compile_blocks(make_model(dim=33, hidden=41, **ONE))))
    assert_as_alone(run, lambda: train_alone(make_model(dim=33, hidden=41, **ONE), compile_blocks), LOSS, GRADIENT)


def tied(rank: int) -> None:
    process_state.reset()
    sizes: Any = {"tied": True, **ONE}
    model = shard(make_model(**sizes))
    run = train_sharded(model, call=torch.compile(model, backend=backend()))
    reference = lambda: train_alone(make_model(**sizes), lambda m: torch.compile(m, backend=backend()))  # noqa: E731
    assert_as_alone(run, reference, LOSS, GRADIENT)


def frozen(rank: int) -> None:
    def with_frozen(model: Model) -> Model:
        for block in model.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)
        return model

    model = shard(compile_blocks(with_frozen(make_model(**ONE))))
    run = train_sharded(model)
    assert "blocks.0.up.weight" not in run.gradients
    assert_as_alone(run, lambda: train_alone(with_frozen(make_model(**ONE)), compile_blocks), LOSS, GRADIENT)


def offloaded(rank: int) -> None:
    model = compile_blocks(make_model(**ONE))
    run = train_sharded(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    assert_as_alone(run, lambda: in_one_process(**ONE), LOSS, GRADIENT)


def replicated(rank: int) -> None:
    """DistributedDataParallel: around compiled blocks, and compiled itself; FP32 parameters."""
    process_state.reset()
    for compiled in (False, True):
        ddp = DistributedDataParallel(make_model(**ONE) if compiled else compile_blocks(make_model(**ONE)))
        run = train_sharded(ddp, call=torch.compile(ddp, backend=backend()) if compiled else None)
        run.gradients = {name.removeprefix("module."): g for name, g in run.gradients.items()}
        whole = lambda: train_alone(make_model(**ONE), lambda m: torch.compile(m, backend=backend()), torch.float32)  # noqa: E731
        assert_as_alone(run, whole if compiled else lambda: in_one_process(torch.float32, **ONE), 1e-5, 1e-4)


CASES: list[Any] = [
    whole, tied, replicated, by_blocks, in_fp32, kept_unsharded, accumulated, checkpointed, from_meta, uneven, frozen,
    offloaded,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_one_process(ranks: Ranks, case: Any) -> None:
    ranks.run(case, group=__name__)
