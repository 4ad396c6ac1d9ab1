"""A rank that dies in a step or in a save: the other one gets an error, and the last whole checkpoint goes on as if
nothing had happened, 8-bit optimizer states and all.

torch.distributed.checkpoint says what is whole: it writes `.metadata` when every rank has written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sharding import EAGER, compile_blocks, local_batch, loss_of, make_model, shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import fp8compile

SAVED, LAST, EXIT_CODE = 2, 4, 3  # steps after which it is saved, and after which runs are compared
write_item = filesystem._write_item


class Training:
    """As torchtitan orders it: FP8 gather, activation checkpointing, compiled blocks, shards, compiled optimizer."""

    def __init__(self, compiles: bool = True) -> None:
        model = fp8compile.prepare_fsdp(make_model(layers=1))
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        self.model = shard(compile_blocks(model) if compiles else model)
        self.opt = fp8compile.prepare_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.update = torch.compile(self.opt.step, backend="fp8", options=EAGER)

    def steps(self, numbers: Iterable[int]) -> None:
        for i in numbers:
            tokens, targets = local_batch(i)
            loss_of(self.model(tokens), targets).backward()
            self.update()
            self.opt.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.opt)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def bits(self) -> list[bytes]:
        """This rank's parameters and states, 8-bit ones as their parts."""
        state, found = self.state(), []
        for x in (*state["model"].values(), *(x for s in state["optimizer"]["state"].values() for x in s.values())):
            local: Any = x.to_local() if isinstance(x, DTensor) else x
            is_fp8 = isinstance(local, fp8compile.FP8State)
            parts = [local.payload, local.side, local.counter] if is_fp8 else [local]
            found += [part.flatten().view(torch.uint8).numpy().tobytes() for part in parts if part is not None]
        return found


def undisturbed(rank: int, folder: str) -> list[bytes]:
    training = Training()
    training.steps(range(SAVED))
    dcp.save(training.state(), checkpoint_id=f"{folder}/whole")
    training.steps(range(SAVED, LAST))
    return training.bits()


def dying_in_backward(module: Any, inputs: Any, y: torch.Tensor) -> None:
    y.register_hook(lambda grad: os._exit(EXIT_CODE))


def dying_while_writing(*args: Any, written: list[Any] = [], **kwargs: Any) -> Any:  # noqa: B006
    written.append(write_item(*args, **kwargs))
    if len(written) == 5:
        os._exit(EXIT_CODE)
    return written[-1]


def dies(rank: int, folder: str, where: str) -> None:
    """Rank 1 goes without a word; what rank 0 gets is left in a file."""
    training = Training(compiles=False)  # its processes are new ones, in which the first compilation takes long
    training.load(f"{folder}/whole")
    if rank == 1 and where == "step":
        training.model.norm.register_forward_hook(dying_in_backward)
    if rank == 1 and where == "save":
        filesystem._write_item = dying_while_writing
    try:
        if where == "step":
            training.steps([SAVED])
        dcp.save(training.state(), checkpoint_id=f"{folder}/torn")
    except Exception as error:
        Path(folder, f"error in {where}").write_text(repr(error))


def resumed(rank: int, folder: str) -> list[bytes]:
    training = Training()
    with pytest.raises(CheckpointException, match="metadata"):
        training.load(f"{folder}/torn")
    training.load(f"{folder}/whole")
    training.steps(range(SAVED, LAST))
    bits = training.bits()
    dcp.save(training.state(), checkpoint_id=f"{folder}/torn")  # over what was left
    training.load(f"{folder}/whole")
    assert training.bits() != bits
    training.load(f"{folder}/torn")
    assert training.bits() == bits
    return bits


@pytest.mark.slow
def test_the_last_whole_checkpoint_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(undisturbed, str(tmp_path))
    for where in ("step", "save"):
        mortal = Ranks()
        with pytest.raises(AssertionError, match=rf"processes have died, .*: \[\(1, {EXIT_CODE}\)\]"):
            mortal.run(dies, str(tmp_path), where)
        mortal.close()
        assert Path(tmp_path, f"error in {where}").exists(), "the other rank waits for ever"
        torn = os.listdir(tmp_path / "torn") if where == "save" else []
        assert ".metadata" not in torn
        assert any(name.startswith("__1_") for name in torn) == (where == "save"), "it had begun to write"
    assert not (tmp_path / "torn" / ".metadata").exists()
    assert ranks.run(resumed, str(tmp_path)) == expected
