"""8-bit optimizer states, sharded by FSDP2: formats, steps, and torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from where import device_type, seeded

import fp8compile
from fp8compile.backend import fp8
from fp8compile.optimizer.shared_step import shared_step

WORLD = 2
RECIPE = {"first": "log/stochastic", "second": "log/stochastic"}


def compiled(opt: torch.optim.Optimizer) -> Any:
    options = {"executor": "eager", "strict": True, "states": RECIPE}
    return torch.compile(opt.step, backend=lambda gm, inputs: fp8(gm, inputs, options=options))


def trained_and_saved(rank: int, folder: str) -> None:
    mesh = init_device_mesh(device_type(), (WORLD,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 33), nn.Linear(33, 128))  # 4224 elements, 17 or 16 rows; rows of 33: FP32
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    opt, reference = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole))
    step = compiled(opt)
    for i in range(3):
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=seeded(i))
            p.grad = distribute_tensor(q.grad, mesh, p.placements)
        step()
        reference.step()
    check_steps(model, whole, opt)
    check_checkpoint(model, opt, folder)


def check_steps(model: nn.Module, whole: nn.Module, opt: torch.optim.Optimizer) -> None:
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        full = p.full_tensor().detach()
        assert (full - q).norm() < 0.01 * q.norm()
        is_eight_bit = isinstance(opt.state[p]["exp_avg"]._local_tensor, fp8compile.FP8State)
        assert is_eight_bit == (q.shape == (33, 128))  # shards of the other matrix would cut groups
    assert sorted(u.parameters for u in fp8compile.compiles()[-1].updates) == [1, 3]


def check_checkpoint(model: nn.Module, opt: torch.optim.Optimizer, folder: str) -> None:
    dcp.save({"optimizer": get_optimizer_state_dict(model, opt)}, checkpoint_id=f"{folder}/checkpoint")
    for p in model.parameters():
        p.grad = None
    other = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), RECIPE)
    state = get_optimizer_state_dict(model, other)
    dcp.load({"optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    set_optimizer_state_dict(model, other, state)
    for p in model.parameters():
        a, b = (o.state[p]["exp_avg"]._local_tensor for o in (opt, other))
        if isinstance(a, fp8compile.FP8State):
            assert torch.equal(a.payload, b.payload)
            assert torch.equal(a.side, b.side)
            assert torch.equal(a.counter, b.counter)
        else:
            assert torch.equal(a, b)


def test_fsdp2_and_its_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(trained_and_saved, str(tmp_path))


def moved(rank: int) -> None:
    """A step of one rule sees each part of a state that moves, as offloading moves them."""
    mesh = init_device_mesh(device_type(), (WORLD,))
    model = nn.Linear(128, 64, bias=False)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(opt.step, backend="fp8", options={"executor": "eager", "strict": True, "states": RECIPE})
    (p,) = model.parameters()
    for _ in range(2):
        p.grad = distribute_tensor(torch.ones(p.shape), mesh, p.placements)
        step()
    known, group = shared_step._shared[opt].groups[0], opt.param_groups[0]
    state = opt.state[p]["exp_avg"]._local_tensor
    assert isinstance(state, fp8compile.FP8State)
    assert known.is_current(opt.state, group)
    state.data = state.like(torch.clone)
    assert not known.is_current(opt.state, group)
    for part in state.parts():
        step()
        known = shared_step._shared[opt].groups[0]
        assert known.is_current(opt.state, group)
        state.data = state.like(lambda x, moved=part: x.clone() if x is moved else x)
        assert not known.is_current(opt.state, group)


def test_parts_that_move_are_seen(ranks: Ranks) -> None:
    ranks.run(moved)
