"""What each rank does to save sharded 8-bit optimizer states, load them again, and compare: on CPUs and on GPUs."""

from __future__ import annotations

import functools
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_states import PARTS, assert_same, first_ranks, fresh, states, trained
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DTensor

import fp8compile

RECIPE = {"first": "log", "second": "log/stochastic", "parameters": "split"}  # has all parts
DTYPE = torch.bfloat16
STAGERS = {
    "default": lambda: None,
    "shared": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "in a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "blocking": BlockingAsyncStager,
    "pinned": lambda: DefaultStager(StagingOptions(True, True, True, True)),  # on GPUs
}


def finish(saving: Any) -> None:
    """Wait for an asynchronous checkpoint."""
    if isinstance(saving, AsyncSaveResponse):
        saving.staging_completion.result()
        saving.upload_completion.result()
    else:
        saving.result()


def loaded(folder: str, mesh: Any, flat: bool) -> torch.optim.Optimizer:
    model, opt = fresh(mesh, RECIPE, DTYPE)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, opt, options=options)
    dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=mesh.get_group())
    set_optimizer_state_dict(model, opt, state, options=options)
    return opt


@functools.cache
def trained_once() -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    """The mesh of two ranks, a model and its optimizer: saving changes nothing of them, so one serves all cases."""
    mesh = first_ranks(2)
    assert mesh is not None
    return mesh, *trained(mesh, RECIPE, dtype=DTYPE)


def saved_asynchronously(
    rank: int, folder: str, stager: str, kind: str, loaded_on: tuple[int, ...], flat: bool
) -> None:
    """One checkpoint, which each of the numbers of ranks in `loaded_on` loads."""
    _, model, opt = trained_once()
    before = states(opt)
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    finish(
        dcp.async_save(
            {"optimizer": state},
            checkpoint_id=folder,
            async_stager=STAGERS[stager](),
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
    )
    assert any("low" in parts for _, parts in before.values())
    for size in loaded_on:
        target = first_ranks(size)
        after = states(loaded(folder, target, flat)) if target is not None else None
        dist.barrier()
        if rank == 0:
            assert_same(before, after)
    assert_same(before, states(opt))


def gathered(rank: int, offload: bool) -> None:
    mesh, model, opt = trained_once()
    before = states(opt)
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    full = get_optimizer_state_dict(model, opt, options=options)
    if offload and rank:
        assert not full
    else:
        compare_gathered(full, before)
    file = io.BytesIO()
    torch.save(full, file)
    everywhere: list[Any] = [file.getvalue()]
    dist.broadcast_object_list(everywhere, src=0)
    read = torch.load(io.BytesIO(everywhere[0]), weights_only=True)
    again, other = fresh(mesh, RECIPE, DTYPE)
    set_optimizer_state_dict(again, other, read, options=StateDictOptions(full_state_dict=True))
    assert_same(before, states(other))


def compare_gathered(full: dict[str, Any], before: Any) -> None:
    """The order of parameters in a group is that of the model."""
    names = full["param_groups"][0]["params"]
    for (index, name), (format, parts) in before.items():
        state = full["state"][names[index]][name]
        assert not isinstance(state, DTensor)
        if format:
            assert isinstance(state, fp8compile.FP8State)
            for part in PARTS:
                x = getattr(state, part)
                assert (x is None) == (part not in parts)
                assert x is None or torch.equal(x.cpu(), parts[part]), (index, name, part)
        else:
            assert torch.equal(state.cpu(), parts["plain"])
