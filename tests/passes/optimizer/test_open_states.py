"""In Dynamo's graph of a step, parts of 8-bit states take the place of the states, and are written as these are."""

from __future__ import annotations

import copy

import pytest
import torch
from pipelines import dynamo_graph, look_after
from test_hoist_state_load_store import Step, adam, graph_of, returned, view
from torch import fx

from fp8compile.backend import fp8
from fp8compile.optimizer.state_parts import INNER
from fp8compile.optimizer.states import FP8State
from fp8compile.passes.optimizer import hoist_state_load_store, open_states


def as_buffer(step: Step, format: str, rounding: str) -> fx.GraphModule:
    """As Dynamo holds a state: a buffer of the graph's module."""
    gm = graph_of(step)
    del gm.s
    torch.manual_seed(0)
    gm.register_buffer("s", FP8State.of(torch.rand(4, 128), rounding, format=format, salt=3))
    hoist_state_load_store.run(dynamo_graph(gm))
    return gm


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "split"])
@pytest.mark.parametrize("format", ["log", "log/stochastic", "e4m3", "e5m2/linear"])
def test_its_parts_are_written_as_the_state_is(format: str, rounding: str) -> None:
    gm = as_buffer(adam, format, rounding)
    closed = copy.deepcopy(gm)
    state, g = gm.s, torch.rand(4, 128)
    open_states.run(c := dynamo_graph(gm))
    present = [part for part in INNER if getattr(state, part) is not None]
    assert c.opened == {f"s_{part}": ("s", part) for part in present}
    assert not any(isinstance(x, FP8State) for x in gm.buffers())
    for _ in range(2):
        assert torch.equal(gm(g)[0], closed(g)[0])
        for part in present:
            assert torch.equal(getattr(state, part), getattr(closed.s, part)), part


@pytest.mark.parametrize("step", [view, returned])
def test_a_state_that_meets_anything_else_stays_closed(step: Step) -> None:
    gm = as_buffer(step, "log", "nearest")
    open_states.run(c := dynamo_graph(gm))
    assert c.opened == {}
    assert isinstance(gm.s, FP8State)


def test_a_compiled_step_has_only_parts_as_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, tuple[str, str]]] = []
    look_after(monkeypatch, "open_states", lambda c: seen.append(c.opened))
    p = torch.nn.Parameter(torch.randn(64, 128))
    opt = torch.optim.AdamW([p], lr=1e-2)
    # torch enters contexts of named backends alone, in which a step of one rule would begin: this one is a whole graph
    step = torch.compile(opt.step, backend=lambda gm, inputs: fp8(gm, inputs, options={"executor": "eager"}))
    p.grad = torch.randn(64, 128)
    step()
    state = opt.state[p]["exp_avg_sq"]
    before = state.counter.clone(), state.payload.clone()
    step()
    assert [part for _, part in seen[-1].values()] == ["payload", "side", "payload", "side", "counter"]
    assert state is opt.state[p]["exp_avg_sq"]
    assert torch.equal(state.counter, before[0] + 1)
    assert not torch.equal(state.payload, before[1])
