"""Pipeline schedules: stages of compiled blocks train as the whole model does in one process, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sharding import Block, Model, backend, batch, loss_of, make_model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from where import device_type

import fp8compile

LAYERS, PARTS = 4, 3  # of the batch


class Stage(nn.Module):
    """Some of a model's blocks, with the embedding before the first and the head behind the last."""

    def __init__(self, model: Model, index: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.embedding = model.embedding if index == 0 else None
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.norm, self.lm_head = (model.norm, model.lm_head) if index == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x)
        return x if self.lm_head is None or self.norm is None else self.lm_head(self.norm(x))


def compiled_blocks(module: nn.Module) -> nn.Module:
    for block in (m for m in module.modules() if isinstance(m, Block)):
        block.compile(backend=backend())
    return module


def compiled_whole(module: nn.Module) -> nn.Module:
    module.compile(backend=backend(), dynamic=False)  # stages that one process runs share a forward, not its sizes
    return module


def piped(rank: int, make_schedule: Callable[..., Any], stages: int, prepare: Callable[..., Any]) -> dict[str, Tensor]:
    """Losses of the last stage and gradients of this rank's parameters, of the second of two batches."""
    model = make_model(layers=LAYERS).bfloat16()
    names = {id(p): name for name, p in model.named_parameters()}
    indices = range(rank, stages, dist.get_world_size())
    parts = [prepare(Stage(model, i, stages)) for i in indices]
    made = [PipelineStage(m, i, stages, torch.device(device_type())) for m, i in zip(parts, indices, strict=True)]
    held = made if stages > dist.get_world_size() else made[0]
    schedule = make_schedule(held, PARTS, loss_fn=loss_of, scale_grads=False)
    losses: list[Tensor] = []
    for step in range(2):
        for part in parts:
            part.zero_grad()
        losses.clear()
        tokens, targets = batch(step)
        first, last = indices[0] == 0, indices[-1] == stages - 1
        schedule.step(*((tokens,) if first else ()), **({"target": targets, "losses": losses} if last else {}))
    plans = [m for plan in fp8compile.compiles() for m in plan.matmuls if m.decision == "fp8"]
    assert plans, "nothing was converted"
    found = {names[id(p)]: p.grad for part in parts for p in part.parameters() if p.grad is not None}
    return found | ({"losses": torch.stack(losses).detach()} if losses else {})


def alone(stages: int, prepare: Callable[..., Any]) -> dict[str, Tensor]:
    """The same stages one after the other in one process."""
    model = make_model(layers=LAYERS).bfloat16()
    parts = [prepare(Stage(model, i, stages)) for i in range(stages)]
    losses: list[Tensor] = []
    for step in range(2):
        model.zero_grad()
        losses.clear()
        for x, targets in zip(*(given.chunk(PARTS) for given in batch(step)), strict=True):
            for part in parts:
                x = part(x)
            losses.append(loss := loss_of(x, targets))
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"losses": torch.stack(losses).detach()}


CASES = [
    (ScheduleGPipe, 2, compiled_blocks),
    (Schedule1F1B, 2, compiled_whole),
    (ScheduleInterleaved1F1B, 4, compiled_blocks),
]


@pytest.mark.parametrize(("schedule", "stages", "prepare"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_schedules(ranks: Ranks, schedule: Any, stages: int, prepare: Any) -> None:
    found: dict[str, Tensor] = {}
    for part in ranks.run(piped, schedule, stages, prepare, group=__name__):
        found |= part
    expected = alone(stages, prepare)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert torch.equal(found[name], want), name
