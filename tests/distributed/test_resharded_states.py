"""8-bit optimizer states of sharded parameters do not depend on the number of ranks, and load on another number."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sharded_states import assert_same, first_ranks, fresh, states, trained
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fp8compile

NEAREST = {"first": "log", "second": "e4m3"}  # no random bits: whole trajectories are equal
RANDOM = {"first": "log", "second": "log/stochastic"}
WORLD = 3


@functools.cache
def trained_once(size: int) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer] | None:
    """On the first `size` ranks; what is done with it changes nothing of it."""
    mesh = first_ranks(size)
    return None if mesh is None else (mesh, *trained(mesh, RANDOM))


def steps_do_not_depend_on_ranks(rank: int) -> None:
    """Of an optimizer in one process, and of a sharded one that was fused before it was taken over."""
    found = []
    for size in (1, WORLD):
        mesh = first_ranks(size)
        if mesh is not None:
            model, opt = trained(mesh, NEAREST, fused=size > 1 or None)
            found.append((states(opt), [p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
    for others, parameters in found[1:]:
        assert_same(found[0][0], others)
        assert all(torch.equal(p, q) for p, q in zip(found[0][1], parameters, strict=True))
    formats = {i: format for (i, name), (format, _) in found[0][0].items() if name == "exp_avg"}
    assert [formats[i] for i in (0, 2, 3, 4)] == ["log", "", "log", "log"], "rows of 33 elements cut groups"


def resharded(rank: int, folder: str, saved_on: int, loaded_on: int) -> None:
    """The first rank, which has part in both, compares."""
    source, target = trained_once(saved_on), first_ranks(loaded_on)
    before = after = None
    if source is not None:
        mesh, model, opt = source
        state = {"optimizer": get_optimizer_state_dict(model, opt)}
        dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())
        before = states(opt)
    dist.barrier()
    if target is not None:
        model, opt = fresh(target, RANDOM)
        state = get_optimizer_state_dict(model, opt)
        dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=target.get_group())
        set_optimizer_state_dict(model, opt, state)
        after = states(opt)
    if rank == 0:
        assert_same(before, after)


def test_steps(three: Ranks) -> None:
    three.run(steps_do_not_depend_on_ranks)


@pytest.mark.parametrize("saved_on, loaded_on", [(1, WORLD), (WORLD, 2)])
def test_checkpoints(three: Ranks, saved_on: int, loaded_on: int, tmp_path: Path) -> None:
    three.run(resharded, str(tmp_path), saved_on, loaded_on)


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
