"""Spikes of the loss in the automatic mode: what is one, and that the steps after it run in BF16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.adaptive.loss_spikes import DELAY, LEAST, WINDOW, LossSpikes, loss_among
from fp8compile.errors import OptionError
from fp8compile.options import Options

RUN = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
STEPS = 4  # in BF16 after a first spike


def judged(values: list[float], deviations: float = 6.0) -> list[str]:
    spikes = LossSpikes(deviations)
    return [spikes.judge(value) for value in values]


def test_a_loss_far_above_the_last_ones_is_a_spike():
    flat = [2.0 + 0.1 * (-1) ** i for i in range(LEAST)]  # mean 2, deviation 0.1
    assert not any(judged([*flat, 2.59]))
    *before, why = judged([*flat, 2.61])
    assert not any(before)
    assert why == f"a loss of 2.61, 2 ± 0.1 in the {LEAST} steps before"


def test_what_is_no_spike():
    assert not any(judged([1.0] * (LEAST - 1) + [50.0]))  # too few to compare with
    assert not any(judged([10.0 - 0.01 * i for i in range(200)]))  # it learns
    assert not any(judged([1.0] * LEAST + [1.05]))  # equal losses have a deviation of 1 % all the same
    assert any(judged([1.0] * LEAST + [1.07]))


def test_after_a_spike_all_begins_anew():
    assert [bool(why) for why in judged([1.0] * LEAST + [9.0, 9.0, 9.0])] == [False] * LEAST + [True, False, False]


def test_only_the_last_losses_count():
    spikes = LossSpikes(6.0)
    for value in [100.0, 1.0] * LEAST + [1.0] * WINDOW:
        assert not spikes.judge(value)
    assert spikes.judge(2.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_a_spike_at_once(value):
    assert judged([value]) == [f"a loss of {value}, nan ± nan in the 0 steps before"]


def test_losses_are_read_some_steps_later():
    spikes = LossSpikes(6.0)
    for _ in range(LEAST):
        assert not spikes.add(torch.tensor(1.0))
    late = [bool(spikes.add(torch.tensor(value))) for value in [9.0] + [1.0] * DELAY]
    assert late == [False] * DELAY + [True]


def test_a_loss_is_taken_when_it_is_given():
    """A replayed graph writes the next one to the same place."""
    spikes, place = LossSpikes(6.0), torch.ones(())
    for i in range(LEAST + DELAY + 1):
        place.fill_(9.0 if i == LEAST else 1.0)
        why = spikes.add(place)
    assert "a loss of 9" in why


def test_which_output_is_the_loss():
    loss, logits = torch.zeros((), requires_grad=True), torch.zeros(3, requires_grad=True)
    assert loss_among((logits, torch.zeros(()), loss)) is loss
    assert loss_among([logits, None, 3]) is None
    assert loss_among(loss) is loss


class Regression(nn.Module):
    """Returns its loss, unless it is `outside`."""

    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.outside = outside

    def forward(self, x):
        out = self.layers(x)
        return out if self.outside else out.float().square().mean()


def gradient(model: nn.Module, step: Any, scale: float = 1.0) -> torch.Tensor:
    """Make a step; returns the gradient of a weight, for an input that is equal at each call but for its scale."""
    model.zero_grad()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * scale
    with torch.autocast("cpu", torch.bfloat16):
        out = step(x)
    loss = out.float().square().mean() if out.dim() else out
    if out.dim():
        fp8compile.observe_loss(loss)
    loss.backward()
    grad = model.layers[0].weight.grad
    assert grad is not None
    return grad.clone()


def training_graph() -> fp8compile.AdaptiveGraph:
    (found,) = [g for g in fp8compile.adaptive_graphs() if g.is_training]
    return found


@pytest.mark.parametrize("outside", [False, True])
def test_steps_after_a_spike_run_in_bf16(outside):
    model = Regression(outside)
    adaptive = {"spike_steps": STEPS, "every": 1000}
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": adaptive})
    reference = Regression(outside)
    exact = gradient(reference, reference)
    found = [gradient(model, step, 100.0 if i == LEAST else 1.0) for i in range(LEAST + DELAY + 1 + 2 * STEPS)]
    in_fp8 = [not torch.allclose(g, exact, rtol=1e-2, atol=1e-3 * float(exact.abs().max())) for g in found]
    first = LEAST + DELAY + 1
    assert all(in_fp8[:first])
    assert not any(in_fp8[first : first + STEPS])
    assert all(in_fp8[first + STEPS :])
    (change,) = training_graph().changes
    assert (change.step, change.after) == (first, f"bf16 for {STEPS} steps")
    assert "a loss of" in change.evidence
    assert str(change) in str(training_graph())
    assert training_graph().looks > 1  # it looked again, at once
    assert training_graph().recompiles == 0


def test_each_further_spike_keeps_bf16_twice_as_long():
    model = Regression()
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": {"spike_steps": 1}})
    for i in range(2 * (LEAST + DELAY + 2) + 2):
        gradient(model, step, 100.0 if i in (LEAST, 2 * LEAST + 2) else 1.0)
    assert [change.after for change in training_graph().changes] == ["bf16 for 1 steps", "bf16 for 2 steps"]


def test_a_graph_that_makes_no_more_changes_is_taken_back_all_the_same():
    model = Regression()
    adaptive = {"recompiles": 0, "minimum": 100.0, "every": 1}  # more than any cast keeps
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": adaptive})
    gradient(model, step)
    with pytest.warns(fp8compile.Fp8Warning, match="0 recompiles are used up, and 6 more casts lose too much"):
        gradient(model, step)
    for i in range(2, LEAST + DELAY + 2):
        gradient(model, step, 100.0 if i == LEAST else 1.0)
    assert "recompiles are used up" in training_graph().why_done
    assert [change.after for change in training_graph().changes] == ["bf16 for 16 steps"]


def test_nothing_is_looked_at_where_spikes_are_off():
    model = Regression()
    step = torch.compile(model, backend="fp8", options={**RUN, "adaptive": {"spike": 0}})
    for i in range(LEAST + DELAY + 2):
        gradient(model, step, 100.0 if i == LEAST else 1.0)
    assert training_graph().changes == []


def test_a_loss_without_the_automatic_mode_changes_nothing():
    model = Regression()
    step = torch.compile(model, backend="fp8", options=RUN)
    before = gradient(model, step)
    for _ in range(DELAY + 1):
        fp8compile.observe_loss(torch.tensor(torch.nan))
    assert torch.equal(gradient(model, step), before)
    assert fp8compile.adaptive_graphs() == []


@pytest.mark.parametrize(("setting", "message"), [
    ({"spike": -1.0}, "spike is a number of at least 0"),
    ({"spike_steps": 0}, "spike_steps is a whole number of at least 1"),
    ({"ranks": "all"}, 'ranks is "world", a process group or None'),
])  # fmt: skip
def test_settings_that_mean_nothing(setting, message):
    with pytest.raises(OptionError, match=message):
        Options.parse({"adaptive": setting})


def test_ranks_need_a_process_group():
    step = torch.compile(Regression(), backend="fp8", options={**RUN, "adaptive": {"ranks": "world"}})
    with pytest.raises(OptionError, match="init_process_group"):
        step(torch.randn(8, 32))
