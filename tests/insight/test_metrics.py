"""metrics: numbers for loggers, each against what it counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import process_state

RUN = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}


class Net(nn.Module):
    """Two layers and a product that no matmul makes; `gain` plants an outlier channel in what the second reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 16)
        self.register_buffer("gain", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gain)


def train(step: Callable[..., Any], steps: int = 1, rows: int = 32) -> None:
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            out = step(torch.randn(rows, 32))
        out.float().square().mean().backward()


def test_nothing_is_known_before_anything_is_compiled() -> None:
    assert fp8compile.metrics() == {}


def test_plans_and_states_are_counted() -> None:
    model = Net()
    opt = torch.optim.AdamW(model.parameters())
    train(torch.compile(model, backend="fp8", options={**RUN, "skip": ["second"]}))
    torch.compile(opt.step, backend="fp8", options={"executor": "eager", "strict": True})()
    found = fp8compile.metrics()
    (plan,) = [plan for plan in fp8compile.compiles() if plan.graph == "training"]
    flops = {True: 0, False: 0}
    for row in plan.matmuls:
        flops[row.decision == "fp8"] += 2 * int(row.m) * int(row.n) * int(row.k)
    assert found["fp8/share"] == flops[True] / (flops[True] + flops[False])
    assert 0 < found["fp8/share"] < 1
    assert (found["fp8/matmuls"], found["fp8/matmuls_left"]) == (len(plan.converted), len(plan.kept))
    assert (found["fp8/graphs"], found["fp8/failures"]) == (1, 0)
    assert found["fp8/saved_gib"] == plan.saved_bytes / 2**30
    assert 0 < found["fp8/saved_gib"] < found["fp8/saved_gib_as_computed"]
    held = sum(x.numel() * 4 for p in model.parameters() for n, x in opt.state[p].items() if n != "step")
    assert found["fp8/states_gib_plain"] == pytest.approx(held / 2**30, rel=0.01)
    assert 0 < found["fp8/states_gib"] <= found["fp8/states_gib_plain"]
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
    assert not {"fp8/sqnr_db", "fp8/changes"} & found.keys()  # nothing was measured


def test_what_is_kept_is_of_the_last_size() -> None:
    step = torch.compile(Net(), backend="fp8", dynamic=False, options=RUN)
    train(step, rows=32)
    small = fp8compile.metrics()
    train(step, rows=64)
    large = fp8compile.metrics()
    assert large["fp8/graphs"] == 2 * small["fp8/graphs"] == 2
    assert small["fp8/saved_gib"] < large["fp8/saved_gib"] < 2.5 * small["fp8/saved_gib"]
    assert large["fp8/matmuls"] == 2 * small["fp8/matmuls"]


def test_the_automatic_mode_tells_what_it_changed_and_saw() -> None:
    model = Net()
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": {"every": 1}})
    train(step, 4)
    before = fp8compile.metrics()
    assert before["fp8/looks"] >= 1
    assert before["fp8/changes"] == before["fp8/returns"] == 0
    assert 20 < before["fp8/sqnr_db"] < 40
    assert before["fp8/saturated"] == before["fp8/not_finite"] == 0
    model.gain[3] = 1e6
    train(step, 8)
    after = fp8compile.metrics()
    (graph,) = fp8compile.adaptive_graphs()
    assert after["fp8/changes"] == len(graph.changes) > 0
    assert after["fp8/recompiles"] == graph.recompiles > 0
    assert after["fp8/looks"] > before["fp8/looks"]
    assert after["fp8/graphs"] == 1, "versions that have been replaced count no more"
    assert after["fp8/matmuls"] == len(graph.plan.converted)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        step(torch.randn(32, 32))  # a graph for inference, which follows the training graph
    model.gain[5] = 1e9
    train(step, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        step(torch.randn(32, 32))
    (inference,) = [g for g in fp8compile.adaptive_graphs() if not g.is_training]
    followed = fp8compile.metrics()
    assert followed["fp8/graphs"] == 2
    assert followed["fp8/matmuls"] == len(graph.plan.converted) + len(inference.plan.converted)
    assert after["fp8/sqnr_db"] > 15, "a cast that was given up, and is still measured, is none that runs"


def test_a_return_to_a_cheaper_cast_is_told_apart() -> None:
    model = Net()
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": {"every": 1, "patience": 1}})
    model.gain[3] = 1e6
    train(step, 6)
    assert fp8compile.metrics()["fp8/returns"] == 0
    model.gain[3] = 1.0
    train(step, 8)
    found = fp8compile.metrics()
    assert 0 < found["fp8/returns"] < found["fp8/changes"]


def test_a_watched_model_tells_its_casts() -> None:
    model = Net()
    watched = fp8compile.watch(model, steps=2, options=RUN)
    train(watched, 2)
    found = fp8compile.metrics(watched)
    rows = watched.statistics.rows()
    assert found["fp8/sqnr_db"] == min(row.sqnr for row in rows if row.sqnr is not None)
    assert found["fp8/underflown"] == max(row.underflown for row in rows)
    assert found["fp8/matmuls"] == sum(len(plan.converted) for plan in watched.statistics.plans)
    assert "fp8/sqnr_db" not in fp8compile.metrics()
    process_state.reset()
    assert fp8compile.metrics() == {}
