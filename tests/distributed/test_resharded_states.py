"""8-bit optimizer states of sharded parameters do not depend on the number of ranks, and load on another number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sharding import backend
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fp8compile

NEAREST = {"first": "log", "second": "e4m3"}  # no random bits: whole trajectories are equal
PARTS = ("payload", "side", "counter", "low")
WORLD = 4


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Processes enough for every number of ranks; those that a case does not need wait."""
    started = Ranks(WORLD)
    yield started
    started.close()


def make() -> nn.Module:
    """33 rows of 128 do not divide by two or four; rows of 33 cut groups."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 33), nn.Linear(33, 128), nn.Linear(128, 256, bias=False), nn.Linear(256, 128))


def first(size: int) -> DeviceMesh | None:
    """A mesh of the first ranks, on those."""
    group = dist.new_group(list(range(size)))
    return DeviceMesh.from_group(group, "cpu") if dist.get_rank() < size else None


def trained(mesh: DeviceMesh, recipe: Any, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After some steps with gradients that do not depend on the mesh."""
    model = fully_shard(make(), mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(opt.step, backend=backend(states=recipe))
    for i in range(steps):
        for p in model.parameters():
            assert isinstance(p, DTensor)
            generator = torch.Generator().manual_seed(i + p.numel())
            p.grad = distribute_tensor(torch.randn(p.shape, generator=generator), mesh, p.placements)
        step()
    return model, opt


def whole(x: DTensor) -> tuple[str, dict[str, torch.Tensor]]:
    """A state's format, and its parts with the rows of all ranks of its mesh (or the plain tensor)."""
    local = x._local_tensor
    parts = {n: getattr(local, n) for n in PARTS if getattr(local, n, None) is not None} or {"plain": local}
    gathered: list[Any] = [None] * x.device_mesh.size()
    dist.all_gather_object(gathered, {n: t.clone() for n, t in parts.items()}, group=x.device_mesh.get_group())
    parts = {n: torch.cat([g[n] for g in gathered]) if n != "counter" else gathered[0][n] for n in parts}
    return getattr(local, "format", ""), parts


def states(opt: torch.optim.Optimizer) -> dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]:
    parameters = [p for group in opt.param_groups for p in group["params"]]
    named = {(i, name): x for i, p in enumerate(parameters) for name, x in opt.state[p].items()}
    return {key: whole(x) for key, x in named.items() if isinstance(x, DTensor)}


def assert_same(one: Any, other: Any) -> None:
    """States bit for bit; both moments of three weights are in 8 bits."""
    assert one.keys() == other.keys()
    for key, (format, parts) in one.items():
        assert format == other[key][0]
        assert parts.keys() == other[key][1].keys()
        for part, x in parts.items():
            assert torch.equal(x, other[key][1][part]), (key, part)
    assert sum(bool(format) for format, _ in one.values()) == 2 * 3


def steps_do_not_depend_on_ranks(rank: int) -> None:
    found = []
    for size in (1, 2, WORLD):
        mesh = first(size)
        if mesh is not None:
            model, opt = trained(mesh, NEAREST)
            found.append((states(opt), [p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
    for others, parameters in found[1:]:
        assert_same(found[0][0], others)
        assert all(torch.equal(p, q) for p, q in zip(found[0][1], parameters, strict=True))
    formats = {i: format for (i, name), (format, _) in found[0][0].items() if name == "exp_avg"}
    assert [formats[i] for i in (0, 2, 4, 5)] == ["log", "", "log", "log"], "rows of 33 elements cut groups"


def fresh(mesh: DeviceMesh, recipe: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make(), mesh=mesh)
    return model, fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)


def resharded(rank: int, folder: str, saved_on: int, loaded_on: int) -> None:
    """The first rank, which has part in both, compares."""
    recipe = {"first": "log", "second": "log/stochastic"}
    source, target = first(saved_on), first(loaded_on)
    before = after = None
    if source is not None:
        model, opt = trained(source, recipe)
        state = {"optimizer": get_optimizer_state_dict(model, opt)}
        dcp.save(state, checkpoint_id=folder, process_group=source.get_group())
        before = states(opt)
    dist.barrier()
    if target is not None:
        model, opt = fresh(target, recipe)
        state = get_optimizer_state_dict(model, opt)
        dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=target.get_group())
        set_optimizer_state_dict(model, opt, state)
        after = states(opt)
    if rank == 0:
        assert_same(before, after)


def test_steps(four: Ranks) -> None:
    four.run(steps_do_not_depend_on_ranks)


@pytest.mark.parametrize("saved_on, loaded_on", [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_checkpoints(four: Ranks, saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    four.run(resharded, str(tmp_path), saved_on, loaded_on)


def test_rows_of_a_state() -> None:
    x = torch.randn(6, 64)
    state = fp8compile.FP8State.of(x, format="log")
    assert torch.equal(state[2:4].dequantize(), state.dequantize()[2:4])
    assert torch.equal(state[4:].dequantize(), state.dequantize()[4:])
    other = fp8compile.FP8State.of(torch.randn(6, 64), format="log")
    state[2:4].copy_(other[2:4])
    assert torch.equal(state.dequantize()[2:4], other.dequantize()[2:4])
    assert not torch.equal(state.dequantize()[:2], other.dequantize()[:2])
    for first, last in ((1, 3), (1, 4), (2, 3)):
        with pytest.raises(fp8compile.StateError, match="whole groups of 128"):
            state[first:last]
