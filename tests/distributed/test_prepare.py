"""prepare_fsdp: which weights it takes, what it refuses, and what the plan says of them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharding import backend, compile_blocks, local_batch, loss_of, make_model, shard, train_sharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fp8compile
from fp8compile.distributed import fsdp
from fp8compile.distributed.gathered_weight import GatheredWeight
from fp8compile.formats import BLOCK128, TENSOR
from fp8compile.kernels.reference import markers


def test_chosen_weights() -> None:
    """Linears of blocks; not the head, not embeddings, not vectors."""
    expected = [f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("gate", "up", "down")]
    assert fsdp.gathered_names(fp8compile.prepare_fsdp(make_model())) == expected
    with_head = fp8compile.prepare_fsdp(make_model(), lm_head=True)
    assert fsdp.gathered_names(with_head) == [*expected, "lm_head.weight"]
    without_up = fp8compile.prepare_fsdp(make_model(), skip=["up", "blocks.1"])
    assert fsdp.gathered_names(without_up) == ["blocks.0.gate.weight", "blocks.0.down.weight"]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"granularity": "row"}, "unknown granularity of a gathered weight 'row'"),
        ({"skip": ["blokcs"]}, "skip='blokcs' names no module"),
        ({"skip": ["blocks"]}, "no weight to gather as FP8"),
        ({"skip": 3}, "takes module path patterns"),
    ],
)
def test_what_means_nothing_is_refused(how: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(fp8compile.OptionError, match=message):
        fp8compile.prepare_fsdp(model, **how)
    assert not fsdp.gathered_names(model)


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(fp8compile.OptionError, match="no weight to gather"):
        fp8compile.prepare_fsdp(nn.Sequential(nn.Embedding(16, 16), nn.LayerNorm(16), nn.Linear(16, 15)))


def test_twice_is_refused() -> None:
    model = fp8compile.prepare_fsdp(make_model())
    with pytest.raises(fp8compile.ShardingError, match="prepared already"):
        fp8compile.prepare_fsdp(model)


def test_without_fully_shard_it_raises() -> None:
    model = fp8compile.prepare_fsdp(make_model())
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with pytest.raises(fp8compile.ShardingError, match=r"blocks\.0\.gate\.weight, but fully_shard was not"):
        model(tokens)
    with pytest.raises(Exception, match="but fully_shard was not"):
        torch.compile(model, backend=backend())(tokens)


def test_a_plain_state_dict_before_sharding() -> None:
    model, plain = make_model(), make_model()
    fp8compile.prepare_fsdp(model)
    state = model.state_dict()
    assert all(type(x) is Tensor for x in state.values())
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in state.items())
    model.load_state_dict({name: x + 1 for name, x in state.items()}, assign=True)
    assert len(fsdp.gathered_names(model)) == 6


def test_a_weight_of_two_linears_stays_while_one_is_there() -> None:
    model = make_model()
    first, second = model.blocks
    second.gate.weight = first.gate.weight
    fp8compile.prepare_fsdp(model)
    cast = second.gate.weight.cast
    assert first.gate.weight is second.gate.weight
    first.gate = nn.Identity()
    gc.collect()
    assert cast.module() is second.gate
    second.gate = nn.Identity()
    gc.collect()
    assert cast.is_gone


def sharded_in_part(rank: int) -> None:
    model = compile_blocks(fp8compile.prepare_fsdp(make_model()))
    fully_shard(model.blocks[0])
    with pytest.raises(fp8compile.ShardingError, match=r"blocks\.1\.gate\.weight was prepared .* has not sharded it"):
        model(local_batch(0)[0])


def sharded_before(rank: int) -> None:
    model = shard(make_model())
    with pytest.raises(fp8compile.ShardingError, match="before fully_shard"):
        fp8compile.prepare_fsdp(model)


def sharded_by_columns(rank: int) -> None:
    model = fp8compile.prepare_fsdp(make_model())
    shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    with pytest.raises(fp8compile.ShardingError, match="rows are sharded over one dimension"):
        model(local_batch(0)[0])


def written_to(rank: int) -> None:
    """Inside forward a gathered weight is read-only."""
    model = shard(fp8compile.prepare_fsdp(make_model()))
    model.blocks[0].gate.register_forward_pre_hook(lambda m, args: m.weight.data.mul_(2))
    with pytest.raises(fp8compile.ShardingError, match="read-only"), torch.no_grad():
        model(local_batch(0)[0])


def left_by_an_option(rank: int) -> None:
    """A matmul that stays BF16 although its weight was gathered in FP8: a warning and the plan say so."""
    model = shard(compile_blocks(fp8compile.prepare_fsdp(make_model()), skip=["up"]))
    with pytest.warns(fp8compile.Fp8Warning, match=r"2 matmuls do not take a weight as it was gathered. up output"):
        train_sharded(model, steps=1)
    rows = [m for m in fp8compile.last_compile().matmuls if m.path == "up" and m.role != "grad_weight"]
    assert len(rows) == 2
    assert all(m.decision == "bf16" and "gathered in FP8, and is read rounded" in m.reason for m in rows)


def granularities_that_do_not_go_together(rank: int) -> None:
    model = shard(compile_blocks(fp8compile.prepare_fsdp(make_model()), recipe="blockwise"))
    with pytest.warns(fp8compile.Fp8Warning, match=r"cast again: scales of tensor do not go with group\(128\)"):
        train_sharded(model, steps=1)
    rows = [m for m in fp8compile.last_compile().matmuls if m.role == "output"]
    assert all("cast again: scales of tensor do not go with group(128)" in m.reason for m in rows)
    assert all(m.decision == "fp8" and not m.right.gathered for m in rows)


def eager(rank: int) -> None:
    """Without compiling, a linear multiplies with the dequantized weight."""
    model, plain = shard(fp8compile.prepare_fsdp(make_model())), shard(make_model())
    tokens = local_batch(0)[0]
    mine, theirs = model(tokens), plain(tokens)
    assert 1e-4 < float((mine - theirs).norm() / theirs.norm()) < 0.05
    loss_of(mine, local_batch(0)[1]).backward()
    assert all(p.grad is not None for p in model.parameters())


def copied(rank: int) -> None:
    """A copy of a prepared model has scales of its own, and so has a copy of a part of it."""
    tokens = local_batch(0)[0]
    for keep_casts in (False, True):
        model = fp8compile.prepare_fsdp(make_model(), keep_casts=keep_casts)
        whole, part = copy.deepcopy(model), make_model()
        part.blocks[1] = copy.deepcopy(model.blocks[1])
        assert len(fsdp.gathered_names(whole)) == 6
        assert len(fsdp.gathered_names(part)) == 3
        same, larger = make_model(), make_model()
        for one in (model, whole, part, same, larger):
            shard(one)
        for factor in (1, 8, 8):  # of the original nothing changes, and it is read first
            with torch.no_grad():
                for block in (*whole.blocks, *part.blocks, *larger.blocks):
                    block.down.weight.mul_(factor)
            for one, plain in ((model, same), (whole, larger), (part, larger)):
                expected = plain(tokens)
                assert float((one(tokens) - expected).norm() / expected.norm()) < 0.1


def validated_in_between(rank: int) -> None:
    """Scales made in inference mode serve training as well."""

    def trained(model: Any) -> tuple[Tensor, list[float]]:
        """Its outputs after some steps, and losses of further ones."""
        train_sharded(model := shard(compile_blocks(model)))
        with torch.inference_mode():
            outputs = model(local_batch(0)[0])
        return outputs, train_sharded(model).losses

    expected, losses = trained(make_model(layers=1))
    for keep_casts in (False, True):
        found, ours = trained(fp8compile.prepare_fsdp(make_model(layers=1), keep_casts=keep_casts))
        assert float((found - expected).norm() / expected.norm()) < 0.05, keep_casts
        assert ours == pytest.approx(losses, rel=0.01), keep_casts


CASES = [
    sharded_in_part, sharded_before, sharded_by_columns, written_to, left_by_an_option,
    granularities_that_do_not_go_together, eager, copied, validated_in_between,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_when_it_is_sharded(ranks: Ranks, case: Any) -> None:
    ranks.run(case)


@pytest.mark.parametrize("granularity", [TENSOR, BLOCK128], ids=str)
def test_a_gathered_weight_is_a_tensor(granularity: Any) -> None:
    x = torch.randn(160, 256)
    scale = markers.scale(markers.amax(x, str(granularity)), "e4m3")
    payload = markers.quantize(x, scale, "e4m3", str(granularity))
    weight = GatheredWeight(payload, scale, str(granularity), torch.bfloat16)
    plain = markers.dequantize(payload, scale, str(granularity), torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight + 0, plain)
    assert torch.equal(weight.t() + 0, plain.t())
    assert isinstance(weight.t(), GatheredWeight)
    assert isinstance(weight.float(), GatheredWeight)
    assert torch.equal(weight.float() + 0, markers.dequantize(payload, scale, str(granularity), torch.float32))
    a = torch.randn(3, 256).bfloat16()
    assert torch.equal(torch.nn.functional.linear(a, weight), torch.nn.functional.linear(a, plain))
