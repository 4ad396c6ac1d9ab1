"""FP8 all-gather: what a compiled block multiplies with is what the shards were cast to, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from sharding import (
    Model,
    Run,
    assert_as_alone,
    backend,
    compile_blocks,
    in_fp8,
    make_model,
    shard,
    train_alone,
    train_sharded,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from where import device_type

import fp8compile
from fp8compile import process_state
from fp8compile.distributed import fsdp
from fp8compile.passes.matmul import merge_matmuls

# Powers of two as scales make a payload exact in BF16, so that casting it once more (the reference has plain weights)
# changes nothing; and the reference does not merge matmuls either, as merged ones share the scale of their gradients.
EXACT = {"output": {"right": {"power_of_two": True}}, "grad_input": {"right": {"power_of_two": True}}}
LOSS, GRADIENT = 1e-4, 2**-7
ONE = {"layers": 1}  # compiling takes most of the time; two blocks are where one is gathered while another runs


def exact(base: str = "mixed") -> dict[str, Any]:
    return {"base": base, **EXACT}


KEEP = {"keep": False}


def prepared(model: Model, granularity: str = "tensor", **how: Any) -> Model:
    fp8compile.prepare_fsdp(model, granularity, power_of_two=True, keep_casts=KEEP["keep"], **how)
    return model


def alone(model: Model, prepare: Any = None, base: str = "mixed", **how: Any) -> Run:
    """The reference: one process, plain weights that are rounded beforehand, matmuls as they are written."""
    with mock.patch.object(merge_matmuls, "_groups", return_value=[]):
        return train_alone(
            model, prepare or (lambda m: compile_blocks(m, recipe=exact(base))), **{"rounded": in_fp8(), **how}
        )  # fmt: skip


@functools.cache
def reference(**sizes: Any) -> Run:
    """Of a plain model: what most cases are compared with, trained once."""
    return alone(make_model(**sizes))


def assert_direct(gathered: int) -> None:
    """Every matmul is in FP8, and so many take a payload as it arrived."""
    plan = fp8compile.last_compile()
    assert all(m.decision == "fp8" for m in plan.matmuls)
    taken = [m for m in plan.matmuls if m.right is not None and m.right.gathered]
    assert len(taken) == gathered, str(plan)
    assert all("cast again" not in m.reason for m in plan.matmuls)
    assert not [row for row in plan.saved if row.dtype.startswith("float8")], "a payload counts as an activation"


def by_blocks(rank: int) -> None:
    process_state.reset()  # the plan is looked at
    run = train_sharded(shard(compile_blocks(prepared(make_model()))))
    assert_direct(6)  # three linears, each read by output and grad_input
    assert_as_alone(run, reference, LOSS, GRADIENT)


def whole(rank: int) -> None:
    process_state.reset()  # Dynamo leaves alone what it could not compile before
    model = shard(prepared(make_model(**ONE)))
    run = train_sharded(model, call=torch.compile(model, backend=backend()))
    assert_as_alone(
        run,
        lambda: alone(make_model(**ONE), lambda m: torch.compile(m, backend=backend(recipe=exact()))),
        LOSS,
        GRADIENT,
    )


def kept_unsharded(rank: int) -> None:
    run = train_sharded(shard(compile_blocks(prepared(make_model())), reshard_after_forward=False))
    assert_as_alone(run, reference, LOSS, GRADIENT)


def uneven(rank: int) -> None:
    """112 and 48 rows divide by two, 208 do not into blocks of 16: shards of 104; and 16 × 3 rows over two ranks."""
    sizes = {"dim": 48, "hidden": 208, **ONE}
    run = train_sharded(shard(compile_blocks(prepared(make_model(**sizes)))))
    assert_as_alone(run, lambda: reference(**sizes), LOSS, GRADIENT)


def rows_for_one_rank(rank: int) -> None:
    """An odd number of rows, with padding on the last rank: by hand, as linears have multiples of 16."""
    torch.manual_seed(3)
    linear = nn.Linear(16, 16, bias=False)
    expected = in_fp8()("blocks.", linear.weight.detach()[:, :])
    fp8compile.prepare_fsdp(linear, power_of_two=True)
    mesh = init_device_mesh(device_type(), (2,))
    weight = linear.weight
    rows = (9, 7)  # as if 16 rows were 9 and 7
    first = 9 * rank
    local = weight.data_[first : first + rows[rank]].clone()
    linear.weight = nn.Parameter(
        DTensor.from_local(
            fsdp.ShardedWeight(local, weight.cast),
            mesh,
            [torch.distributed.tensor.Shard(0)],
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    )

    class Mesh:
        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return rank

    (payload,), (scale, _, _) = linear.weight._local_tensor.fsdp_pre_all_gather(Mesh(), (17, 16), (16, 1), None, None)
    assert payload.shape == (9, 16)
    assert torch.equal(payload.float()[: rows[rank]] * scale, expected[first : first + rows[rank]])
    assert not payload.float()[rows[rank] :].any()


def uneven_model() -> Model:
    model = make_model(dim=128, hidden=208, **ONE)
    with torch.no_grad():
        for block in model.blocks:
            block.gate.weight[128:] *= 16
            block.up.weight[:128] *= 1 / 16
            block.down.weight[:, 128:] *= 8
    return model


@functools.cache
def reference_by_128_blocks() -> Run:
    return alone(uneven_model(), base="blockwise", rounded=in_fp8(128))


def by_128_blocks(rank: int) -> None:
    """Shards of 104 rows cut blocks of 128, and every block has another magnitude."""

    process_state.reset()
    model = shard(compile_blocks(prepared(uneven_model(), "block(128)"), recipe="blockwise"))
    run = train_sharded(model)
    assert_direct(6)
    assert_as_alone(run, reference_by_128_blocks, LOSS, GRADIENT)


def checkpointed(rank: int) -> None:
    def wrapped(model: Model) -> Model:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return model

    run = train_sharded(shard(compile_blocks(wrapped(prepared(make_model(**ONE))))))
    run.gradients = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in run.gradients.items()}
    assert_as_alone(
        run, lambda: alone(make_model(**ONE), lambda m: compile_blocks(wrapped(m), recipe=exact())), LOSS, GRADIENT
    )


def frozen(rank: int) -> None:
    def with_frozen(model: Model) -> Model:
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    run = train_sharded(shard(compile_blocks(prepared(with_frozen(make_model(**ONE))))))
    assert_as_alone(run, lambda: alone(with_frozen(make_model(**ONE))), LOSS, GRADIENT)


def tied(rank: int) -> None:
    """The head is an embedding table: it is gathered as ever."""
    model = prepared(make_model(tied=True, **ONE), lm_head=True)
    assert "embedding.weight" not in fsdp.gathered_names(model)
    model = shard(compile_blocks(model))
    assert_as_alone(train_sharded(model), lambda: reference(tied=True, **ONE), LOSS, GRADIENT)


def from_meta(rank: int) -> None:
    source = make_model(**ONE)
    with torch.device("meta"):
        model = Model(**ONE)
    model = shard(compile_blocks(prepared(model)))
    model.to_empty(device=device_type())
    with torch.no_grad():
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            p._local_tensor.copy_(q.chunk(2)[rank])
    assert len(fsdp.gathered_names(model)) == 3
    assert_as_alone(train_sharded(model), lambda: reference(**ONE), LOSS, GRADIENT)


def offloaded(rank: int) -> None:
    model = compile_blocks(prepared(make_model(**ONE)))
    run = train_sharded(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    assert_as_alone(run, lambda: reference(**ONE), LOSS, GRADIENT)


def in_bf16(rank: int) -> None:
    """BF16 parameters without a policy."""
    model = shard(compile_blocks(prepared(make_model(**ONE).to(torch.bfloat16))), MixedPrecisionPolicy())
    run = train_sharded(model, steps=1)
    rounded = lambda name, p: in_fp8()(name, p.bfloat16().float())  # noqa: E731
    assert_as_alone(
        run, lambda: alone(make_model(**ONE), steps=1, rounded=rounded), 1e-4, 2**-7
    )  # gradients are averaged in BF16


def hybrid(rank: int) -> None:
    """A replicated and a sharded dimension of the mesh, either of them with one rank only."""
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("replicate", "shard"))
        run = train_sharded(shard(compile_blocks(prepared(make_model(**ONE))), mesh=mesh))
        assert_as_alone(run, lambda: reference(**ONE), LOSS, GRADIENT)


CASES: list[Any] = [
    whole, by_128_blocks, by_blocks, kept_unsharded, uneven, rows_for_one_rank, checkpointed, frozen, tied, from_meta,
    offloaded, in_bf16, hybrid,
]  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """A case where shards are kept in FP8 from step to step."""

    case: Callable[[int], None]

    def __call__(self, rank: int) -> None:
        KEEP["keep"] = True
        try:
            self.case(rank)
        finally:
            KEEP["keep"] = False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_one_process_with_rounded_weights(ranks: Ranks, case: Any) -> None:
    ranks.run(case, group=__name__)


@pytest.mark.parametrize("case", [by_128_blocks, by_blocks, uneven, offloaded, hybrid], ids=lambda case: case.__name__)
def test_where_shards_are_kept(ranks: Ranks, case: Any) -> None:
    ranks.run(Kept(case), group=__name__)
