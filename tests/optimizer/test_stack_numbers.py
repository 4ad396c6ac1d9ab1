"""Numbers of a step (bias corrections, rates, counts) are computed for all parameters at once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from optimizers import assert_near, compiled, make_parameters, set_gradients, step_both, twins
from torch import fx

import fp8compile
from fp8compile import state_ops
from fp8compile.passes import stack_numbers

EXACT = "float32"


@pytest.fixture
def graphs(monkeypatch) -> list[fx.Graph]:
    """Graphs as the pass leaves them."""
    seen: list[fx.Graph] = []
    run = stack_numbers.run

    def observed(graph: fx.Graph) -> None:
        run(graph)
        seen.append(graph)

    monkeypatch.setattr(stack_numbers, "run", observed)
    return seen


def operators(graph: fx.Graph) -> Counter[str]:
    return Counter(str(n.target) for n in graph.nodes if n.op == "call_function")


def test_as_many_operators_for_two_parameters_as_for_seven(graphs):
    for count in (2, 7):
        parameters = make_parameters([(70, 70)] * count)
        step, _ = compiled(torch.optim.AdamW(parameters))
        set_gradients(parameters, 0)
        step()
    of_two, of_seven = operators(graphs[0]), operators(graphs[-1])
    assert of_two == of_seven
    assert of_two["fp8.stack.default"] == of_two["fp8.add_in_place.default"] == 1
    assert "aten.copy_.default" not in of_two


def test_one_parameter_is_left_as_it_is(graphs):
    parameters = make_parameters([(70, 70)])
    step, _ = compiled(torch.optim.AdamW(parameters))
    set_gradients(parameters, 0)
    step()
    assert not {"fp8.stack.default", "fp8.add_in_place.default"} & set(operators(graphs[-1]))


def test_each_parameter_counts_its_own_steps(graphs):
    """One that comes later has other bias corrections."""
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {"lr": 0.01})
    step, _ = compiled(opt, states=EXACT)
    for i, only in enumerate(([0, 2], [0, 1, 2, 3], [0, 1, 2, 3])):
        step_both(i, step, mine, reference.step, theirs, only)
    assert [int(opt.state[p]["step"]) for p in mine[:4]] == [3, 2, 3, 2]
    assert operators(graphs[-1])["fp8.stack.default"] >= 1
    assert_near(mine, theirs, 2e-6)


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01), torch.tensor(0.01, dtype=torch.float64)], ids=str)
def test_groups_with_rates_of_their_own(graphs, rate):
    """Where constants differ, what comes after them is stacked as it is."""
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {"lr": rate})
    for o, parameters in ((opt, mine), (reference, theirs)):
        late = parameters[:2]
        o.param_groups[0]["params"] = parameters[2:]
        o.add_param_group({"params": late, "lr": rate * 0.5, "betas": (0.8, 0.95)})
    step, _ = compiled(opt, states=EXACT)
    for i in range(3):
        step_both(i, step, mine, reference.step, theirs)
    assert any(n.target is state_ops.stack for n in graphs[-1].nodes)
    assert_near(mine, theirs, 2e-6)


def test_counts_on_another_device_than_the_rate():
    """As with `capturable=True`: a number of the CPU beside a vector that is where the parameters are."""
    parameters = make_parameters([(70, 70)] * 3)
    opt = torch.optim.AdamW(parameters, weight_decay=0.0)
    plan = fp8compile.explain(opt.step).plans[-1]  # of a twin on the meta device
    assert [u.reason for u in plan.updates] == [""]
