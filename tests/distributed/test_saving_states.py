"""Every way of torch to save sharded 8-bit optimizer states keeps all bits, or says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from saved_states import STAGERS, gathered, saved_asynchronously

import fp8compile


@pytest.mark.parametrize("stager", [name for name in STAGERS if name != "pinned"])
def test_asynchronous_checkpoints(ranks: Ranks, stager: str, tmp_path: Path) -> None:
    ranks.run(saved_asynchronously, str(tmp_path), stager, "thread", (2, 1), False)


def test_asynchronous_checkpoints_as_torchtitan_makes_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(saved_asynchronously, str(tmp_path), "default", "thread", (2,), True)


def test_asynchronous_checkpoints_by_another_process(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(saved_asynchronously, str(tmp_path), "shared", "process", (2,), False)


@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offloaded"])
def test_whole_states_are_gathered_and_distributed(ranks: Ranks, offload: bool) -> None:
    ranks.run(gathered, offload)


def written_to(rank: int) -> None:
    state = fp8compile.FP8State.of(torch.randn(4, 128), format="log")
    for collective in (dist.broadcast, dist.all_reduce):
        with pytest.raises(fp8compile.StateError, match="no memory of its own"):
            collective(state) if collective is dist.all_reduce else collective(state, 0)
    group = dist.new_group([0, 1], backend="gloo")  # NCCL would first wait for the other rank
    if rank == 0:  # the other one would wait for what is never sent
        state = fp8compile.FP8State.of(torch.randn(4, 128, device="cpu"), format="log")
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            dist.scatter(torch.empty(4, 128, device="cpu"), [state, state], group=group)


def test_collectives_that_write_are_refused(ranks: Ranks) -> None:
    ranks.run(written_to)
