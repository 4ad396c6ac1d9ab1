"""FP8 all-gather: bytes on the wire, the age of scales, and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sharding import Model, backend, compile_blocks, local_batch, loss_of, make_model, shard, train_sharded
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

import fp8compile
from fp8compile.distributed import fsdp, shard_payloads


def prepared(model: Model, keep: bool = False) -> Model:
    fp8compile.prepare_fsdp(model, power_of_two=True, keep_casts=keep)
    return model


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Bytes that go into each call of a collective."""
    original, sizes = getattr(dist, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        sizes.append(args[0].numel() * args[0].element_size())
        return original(*args, **kwargs)

    setattr(dist, name, counting)
    try:
        yield sizes
    finally:
        setattr(dist, name, original)


ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


class CountingGather:
    """FSDP2's all-gather, and how many bytes a rank sent."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.sent += input_tensor.numel() * input_tensor.element_size()
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered_bytes(model: Model) -> int:
    counting = CountingGather()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counting)
    train_sharded(model, steps=1)
    return counting.sent


def bytes_on_the_wire(rank: int) -> None:
    plain = gathered_bytes(shard(compile_blocks(make_model())))
    ours = gathered_bytes(shard(compile_blocks(prepared(make_model()))))
    linears = 2 * 3 * 64 * 128 // 2  # elements of this rank, in BF16 two bytes each and in FP8 one; gathered twice
    assert plain - ours == 2 * linears


def one_all_reduce(rank: int) -> None:
    model = shard(compile_blocks(prepared(make_model())))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    scales = model.blocks[0].up.weight._local_tensor.cast.scales

    def run() -> int:
        with counted("all_reduce") as sizes:
            tokens, targets = local_batch(0)
            loss_of(model(tokens), targets).backward()
        assert all(size == 6 * 4 for size in sizes)
        return len(sizes)

    assert run() == 1
    assert run() == 0  # accumulating: no weight has changed
    opt.step()
    assert run() == 1
    assert scales.updates == 2


def never_stale(rank: int, keep: bool = False) -> None:
    """Whatever writes to a weight: the next gather has the scales of what it has become, and what is kept is it."""
    model = shard(compile_blocks(prepared(make_model(layers=1), keep)))
    weights = [(block.up.weight, name) for name, block in model.blocks.named_children()]
    tokens, targets = local_batch(0)

    def assert_current() -> None:
        model(tokens)
        for weight, _ in weights:
            full = weight.detach().full_tensor()
            cast = weight._local_tensor.cast
            assert float(cast.scale) == float(2 ** torch.ceil(torch.log2(full.abs().max() / 448)))
            assert (cast.payload is not None) == keep
            if keep:
                shard_ = weight._local_tensor.data_
                kept = cast.payload[: shard_.shape[0]].float() * cast.scale
                assert torch.equal(kept, (shard_ / cast.scale).to(torch.float8_e4m3fn).float() * cast.scale)

    def stepped(opt: torch.optim.Optimizer, step: Any) -> None:
        loss_of(model(tokens), targets).backward()
        step()
        opt.zero_grad()

    # made while all parameters are sharded: forward leaves those of the root as they were gathered
    fused = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    foreach = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True)
    one_by_one = torch.optim.SGD(model.parameters(), lr=5.0, foreach=False)
    gathered = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]  # compiling takes long
    compiled = torch.optim.AdamW(gathered, lr=0.5, foreach=True)
    ours = torch.optim.AdamW(gathered, lr=0.5)
    assert_current()
    for opt in (fused, foreach, one_by_one):
        stepped(opt, opt.step)
        assert_current()
    if keep:  # which step is compiled makes no difference to what is kept
        stepped(ours, torch.compile(ours.step, backend=backend()))
    else:
        stepped(compiled, torch.compile(compiled.step, backend="aot_eager"))
    assert_current()
    with torch.no_grad():
        weights[0][0].mul_(16)
    assert_current()
    with torch.no_grad():
        weights[0][0].to_local().mul_(1 / 64)
    assert_current()
    model.load_state_dict({name: x * 8 for name, x in model.state_dict().items()})
    assert_current()
    model.load_state_dict({name: (x * 8).detach() for name, x in model.state_dict().items()}, assign=True)
    assert len(fsdp.gathered_names(model)) == 3
    model(tokens)
    assert_current_after_assign(model)


def never_stale_where_shards_are_kept(rank: int) -> None:
    never_stale(rank, keep=True)


def a_copy_gathers_its_own_weights(rank: int) -> None:
    """A reference model, or an average of the weights, shares the casts of the model that it was copied from."""
    model = prepared(make_model(), keep=True)
    reference = shard(compile_blocks(copy.deepcopy(model)))
    model = shard(compile_blocks(model))
    tokens, targets = local_batch(0)
    expected = reference(tokens)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        loss_of(model(tokens), targets).backward()
        opt.step()
        found = reference(tokens)
        assert (found - expected).float().norm() < 0.1 * expected.float().norm()


def nothing_is_kept_of_casts_that_failed(rank: int) -> None:
    model = shard(compile_blocks(prepared(make_model(), keep=True)))
    tokens, _ = local_batch(0)
    before = model(tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "blocks" in name and parameter.dim() == 2:
                parameter.mul_(-0.5)
    original = shard_payloads._part

    def fails(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    shard_payloads._part = fails
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model.blocks[0].up.weight._local_tensor.cast.scales.update()
    finally:
        shard_payloads._part = original
    assert all(cast.payload is None for cast in model.blocks[0].up.weight._local_tensor.cast.scales.casts)
    fresh = shard(compile_blocks(prepared(make_model())))
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "blocks" in name and parameter.dim() == 2:
                parameter.mul_(-0.5)
    after = model(tokens)
    assert torch.equal(after, fresh(tokens))
    assert not torch.equal(after, before)


def assert_current_after_assign(model: Model) -> None:
    weight = model.blocks[0].up.weight
    assert float(weight._local_tensor.cast.scale) == float(
        2 ** torch.ceil(torch.log2(weight.detach().full_tensor().abs().max() / 448))
    )


def not_finite(rank: int) -> None:
    """An overflow in a weight of one rank is an overflow everywhere."""
    for value in (torch.inf, torch.nan):
        model = shard(compile_blocks(prepared(make_model())))
        if rank == 1:
            with torch.no_grad():
                model.blocks[0].up.weight._local_tensor.data_[0, 0] = value
        else:
            model.blocks[0].up.weight._local_tensor.data_.mul_(1.0)  # every rank writes
        assert not model(local_batch(0)[0]).isfinite().any()


def plain_checkpoints(rank: int) -> None:
    """Names, dtypes and values as without us; and back."""
    ours, theirs = shard(compile_blocks(prepared(make_model()))), shard(make_model())
    mine, plain = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(plain)
    for name, x in plain.items():
        assert type(mine[name]) is type(x)
        assert type(mine[name]._local_tensor) is torch.Tensor
        assert mine[name].dtype == x.dtype
        assert torch.equal(mine[name].full_tensor(), x.full_tensor())
    train_sharded(theirs, steps=1)
    ours.load_state_dict(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name].full_tensor(), x.full_tensor())
    whole = {name: x.full_tensor() for name, x in theirs.state_dict().items()}
    make_model().load_state_dict(whole)
    through_files(ours)


def through_files(ours: Model) -> None:
    """torch.distributed.checkpoint, from a prepared model to one that knows nothing of us."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(ours)}, checkpoint_id=folder[0])
    other = shard(make_model(seed=8))
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    for name, x in ours.state_dict().items():
        assert torch.equal(other.state_dict()[name].full_tensor(), x.full_tensor())


def moved(rank: int) -> None:
    """Another dtype after some steps, as Module.to gives it."""
    model = shard(compile_blocks(prepared(make_model())))
    train_sharded(model, steps=1)
    model.to(torch.bfloat16)
    assert len(fsdp.gathered_names(model)) == 6
    before = model.blocks[0].up.weight._local_tensor.cast.scales.updates
    model(local_batch(0)[0])
    cast = model.blocks[0].up.weight._local_tensor.cast
    assert cast.scales.updates == before + 1
    assert model.blocks[0].up.weight._local_tensor.data_.dtype == torch.bfloat16
    assert_current_after_assign(model)


OTHERS: list[Any] = [
    moved, bytes_on_the_wire, one_all_reduce, never_stale, never_stale_where_shards_are_kept,
    a_copy_gathers_its_own_weights, nothing_is_kept_of_casts_that_failed, not_finite, plain_checkpoints,
]  # fmt: skip


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.__name__)
def test_what_is_gathered(ranks: Ranks, case: Any) -> None:
    ranks.run(case, group=__name__)
