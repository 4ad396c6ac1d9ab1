"""What savers of other libraries, and tools that copy whole optimizers, make of 8-bit states: bit for bit the same."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import compiled, make_parameters, set_gradients
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import fp8compile
from fp8compile import FP8State, StateError

SHAPES = ((70, 65), (9,), (64, 64))
RECIPE = {"first": "e4m3/stochastic", "second": "log/stochastic", "parameters": "split"}
Named = dict[tuple[int, str, str], torch.Tensor]


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


def unused() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of some parameters, and its optimizer."""
    model = nn.Module()
    mine = make_parameters(SHAPES, torch.bfloat16)
    for i, p in enumerate(mine):
        model.register_parameter(f"p{i}", p)
    return model, fp8compile.prepare_optimizer(torch.optim.AdamW(mine, lr=1e-3), RECIPE)


def train(model: nn.Module, opt: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Yields the optimizer's state after each compiled step."""
    step, _ = compiled(opt)
    for i in range(3):
        set_gradients(list(model.parameters()), i)
        step()
        yield copy.deepcopy(opt.state_dict())


@functools.cache
def compiled_steps() -> list[dict[str, Any]]:
    """The optimizer's states after each of three compiled steps, made once."""
    return list(train(*unused()))


def make(steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of some parameters; its optimizer has the 8-bit states of `steps` compiled steps."""
    model, opt = unused()
    if steps:
        opt.load_state_dict(copy.deepcopy(compiled_steps()[steps - 1]))
    return model, opt


def parts_of(states: Any) -> Named:
    """All parts of the states in a `state_dict`."""
    found: Named = {}
    for key, state in states["state"].items():
        for name, x in state.items():
            parts = x.parts() if isinstance(x, FP8State) else [x]
            found |= {(key, name, str(i)): part.clone() for i, part in enumerate(parts)}
    return found


def assert_same(one: Named, other: Named) -> None:
    assert one.keys() == other.keys()
    for key, x in one.items():
        assert x.dtype == other[key].dtype, key
        assert torch.equal(x, other[key]), key


def with_torch(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    torch.save({"optimizer": opt.state_dict()}, folder / "c.pt", _use_new_zipfile_serialization=False)
    other = make()[1]
    other.load_state_dict(torch.load(folder / "c.pt", weights_only=True)["optimizer"])
    return other


def with_fabric(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, opt = fabric.setup(model, opt)
    fabric.save(folder / "c.ckpt", {"model": model, "optimizer": opt})
    again, other = fabric.setup(*make())
    fabric.load(folder / "c.ckpt", {"model": again, "optimizer": other})
    return other


def with_accelerate(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    accelerate = pytest.importorskip("accelerate")
    for mine, action in (((model, opt), "save_state"), (make(), "load_state")):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        opt = accelerator.prepare(*mine)[1]
        getattr(accelerator, action)(str(folder))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return opt


def with_a_hook(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    """A hook that moves what is saved, as offloading trainers have one."""

    def moved(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return torch.utils._pytree.tree_map(lambda x: x.to("cpu", copy=True) if torch.is_tensor(x) else x, state)

    handle = opt.register_state_dict_post_hook(moved)
    try:
        return with_torch(model, opt, folder)
    finally:
        handle.remove()


def offloaded(model: nn.Module, opt: torch.optim.Optimizer, folder: Path) -> torch.optim.Optimizer:
    for state in opt.state.values():
        for name, x in state.items():
            state[name] = x.to("cpu", non_blocking=True)
    return opt


SAVERS = {
    "torch.save": with_torch,
    "state_dict post hook": with_a_hook,
    "states replaced by offloaded ones": offloaded,
    "Lightning": with_fabric,
    "accelerate": with_accelerate,
    "deepcopy of the optimizer": lambda model, opt, folder: copy.deepcopy(opt),
    "pickle of the optimizer": lambda model, opt, folder: pickle.loads(pickle.dumps(opt)),
}


@pytest.mark.parametrize("saver", SAVERS)
def test_savers(saver: str, tmp_path: Path) -> None:
    model, opt = make(steps=2)
    if "of the optimizer" in saver:  # of one that compiled code has stepped
        list(train(model, opt))
    before = parts_of(opt.state_dict())
    assert any(x.dtype == torch.int16 and x.any() for x in before.values())  # missing bits of parameters
    assert_same(before, parts_of(SAVERS[saver](model, opt, tmp_path).state_dict()))


def flip_a_bit(data: bytes, part: torch.Tensor) -> bytes:
    plain = bytes(part.reshape(-1).view(torch.uint8).tolist())
    assert data.count(plain) == 1
    return data.replace(plain, plain[:-1] + bytes([plain[-1] ^ 1]))


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("part", ["payload", "low"])
def test_a_damaged_file_changes_nothing(part: str, prepared: bool) -> None:
    """In the old format of torch.save damage is seen by load_state_dict, else by torch.load."""
    _, opt = make(steps=1)
    state, file = opt.state_dict(), io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    last = [x for s in state["state"].values() for x in s.values() if getattr(x, "low", None) is not None][-1]
    damaged = flip_a_bit(file.getvalue(), getattr(last, part))
    _, other = make(steps=3)
    if not prepared:
        other = torch.optim.AdamW(make_parameters(SHAPES, torch.bfloat16))
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.step()
    before = parts_of(other.state_dict())
    read = torch.load(io.BytesIO(damaged), weights_only=True)
    if prepared:
        with pytest.raises(StateError, match="not what was saved"):
            other.load_state_dict(read)
        assert_same(before, parts_of(other.state_dict()))
    else:  # torch takes what it is given; the first step does not
        other.load_state_dict(read)
        with pytest.raises(StateError, match="not what was saved"):
            other.step()


def test_a_damaged_checkpoint_of_dcp_changes_no_state_that_was_loaded_beside(tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes as it reads; what it reads into a copy reaches the optimizer whole."""
    _, opt = make(steps=1)
    dcp.save({"optimizer": opt.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    last = [x for s in opt.state_dict()["state"].values() for x in s.values() if isinstance(x, FP8State)][-1]
    (file,) = tmp_path.glob("*.distcp")
    whole = file.read_bytes()
    _, other = make(steps=3)
    before = parts_of(other.state_dict())
    target = copy.deepcopy(other.state_dict())
    file.write_bytes(flip_a_bit(whole, last.payload))
    with pytest.raises(CheckpointException, match="not what was saved"):
        dcp.load({"optimizer": target}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(before, parts_of(other.state_dict()))
    file.write_bytes(whole)
    dcp.load({"optimizer": target}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(target)
    assert_same(parts_of(opt.state_dict()), parts_of(other.state_dict()))
