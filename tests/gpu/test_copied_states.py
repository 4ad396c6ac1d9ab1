"""8-bit optimizer states on a GPU are copied, staged in pinned memory, gathered and saved bit for bit."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from saved_states import gathered, saved_asynchronously
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from fp8compile import FP8State
from fp8compile.optimizer import state_checks

pytestmark = pytest.mark.gpu
PARTS = ("payload", "side", "counter", "low")
STAGERS = {
    "pinned": StagingOptions(True, False, False, True),
    "pinned and shared": StagingOptions(True, True, False, True),
    "in a thread": StagingOptions(True, True, True, True),
    "not pinned": StagingOptions(False, False, False, False),
}
# torch 2.11's stages once: then it fails for any tensor
CLOSES_ITSELF = "_state_dict_stager.close()" in inspect.getsource(DefaultStager._stage)


def make(rows: int = 4099) -> FP8State:
    """A state with all parts, of whole groups and one that is cut off."""
    state = FP8State.of(torch.randn(rows, 513, device="cuda"), "split", format="log/stochastic", salt=7)
    assert state.low is not None
    state.low.random_(-(1 << 15), 1 << 15)
    return state


def assert_same(a: FP8State, b: Any) -> None:
    assert type(b) is FP8State
    for name in PARTS:
        assert torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()), name


@pytest.mark.parametrize("name", STAGERS)
def test_staging(name: str) -> None:
    """The second time reuses the memory of the first."""
    stager, state = DefaultStager(STAGERS[name]), make()
    try:
        for _ in range(1 if CLOSES_ITSELF else 2):
            staged = stager.stage({"state": state})
            found = staged["state"] if isinstance(staged, dict) else staged.result()["state"]
            assert found.device.type == "cpu"
            assert_same(state, found)
            assert found.payload.is_pinned() == STAGERS[name].use_pinned_memory
            state.store(torch.randn_like(state.dequantize()))
    finally:
        stager.close()


@pytest.mark.parametrize("cached", [False, True])
def test_blocking_staging(cached: bool) -> None:
    stager, state = BlockingAsyncStager(cache_staged_state_dict=cached), make()
    for _ in range(2):
        assert_same(state, stager.stage({"state": state})["state"])
        state.store(torch.randn_like(state.dequantize()))


def offloaded(state: FP8State) -> FP8State:
    """There and back, as trainers do that keep states on the host between steps."""
    state.data = state.data.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert state.device.type == state.payload.device.type == "cpu"
    state.data = state.data.to("cuda")
    assert state.device.type == state.payload.device.type == "cuda"
    return state


def saved(state: FP8State) -> FP8State:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")


def recorded(state: FP8State) -> FP8State:
    state.record_stream(torch.cuda.Stream())
    return state


WAYS: dict[str, Callable[[FP8State], Any]] = {
    "cpu": lambda state: state.cpu(),
    "to and back": offloaded,
    "pin_memory": lambda state: state.cpu().pin_memory(),
    "empty_like, pinned": lambda state: torch.empty_like(state, device="cpu", pin_memory=True).copy_(state),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "record_stream": recorded,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str) -> None:
    state = make()
    before = state.clone()
    result = WAYS[way](state)
    torch.cuda.synchronize()
    assert_same(before, result)
    if "pin" in way:
        assert result.is_pinned()


def test_checksums_are_those_of_a_cpu_and_take_little_memory() -> None:
    state = make(1 << 17)
    expected = state_checks.checksum(state.cpu())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert state_checks.checksum(state) == expected
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def test_async_save(tmp_path: Path) -> None:
    state = make()
    before = state.clone()
    for stager in (None, DefaultStager(STAGERS["in a thread"])):
        saving: Any = dcp.async_save({"s": state}, checkpoint_id=tmp_path, async_stager=stager, no_dist=True)
        (saving if stager is None else saving.upload_completion).result()
        target = {"s": torch.zeros_like(state)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        assert_same(before, target["s"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with FP8 matmul units")
def test_two_gpus(tmp_path: Path) -> None:
    """Asynchronous checkpoints from pinned memory, and whole states gathered and scattered over NCCL."""
    gpus = Ranks(2, "cpu:gloo,cuda:nccl")  # DCP saves asynchronously over a group of CPUs
    try:
        for number, (stager, loaded_on) in enumerate((("default", 2), ("default", 1), ("pinned", 2))):
            gpus.run(saved_asynchronously, str(tmp_path / str(number)), stager, "thread", (loaded_on,), False)
        gpus.run(gathered, False)
        gpus.run(gathered, True)
    finally:
        gpus.close()
