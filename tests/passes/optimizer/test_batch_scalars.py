"""Numbers of a step (bias corrections, rates, counts) are computed for all parameters at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import assert_near, compiled, make_parameters, set_gradients, step_both, twins
from pipelines import Run, look_after, wrap_pass
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import fp8compile
from fp8compile.kernels.optimizer.update_spec import from_json
from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten, update_value, value
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer import batch_scalars

EXACT = "float32"


@pytest.fixture
def pairs(monkeypatch) -> list[tuple[fx.Graph, fx.Graph]]:
    """Graphs before the pass, and after it."""
    seen: list[tuple[fx.Graph, fx.Graph]] = []

    def wrap(run: Run) -> Run:
        def observed(c: OptimizerGraph) -> None:
            before = copy_graph(c.graph)
            run(c)
            seen.append((before, copy_graph(c.graph)))

        return observed

    wrap_pass(monkeypatch, "batch_scalars", wrap)
    return seen


class OnCPU(fx.Transformer):
    """A graph of another device, on the CPU."""

    def call_function(self, target, args, kwargs):
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, dict(kwargs)))
        return super().call_function(target, args, kwargs)


def numbers_of(graph: fx.Graph) -> torch.Tensor:
    """What the only update of `graph` reads for each parameter and number, if scalars that come in are 3, 4, 5, …"""
    graph = copy_graph(graph)
    (update,) = graph.find_nodes(op="call_function", target=state_ops.update_parameters)
    numbers, each = list(update.args[2]), len(from_json(update.args[3]).scalars)
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or (node.op == "call_function" and not node.users and node not in numbers):
            graph.erase_node(node)
    graph.output(numbers)
    graph.eliminate_dead_code()
    given = list(graph.find_nodes(op="placeholder"))
    names = sorted(n.name for n in given if n.meta["val"].dim() == 0)
    values = {n: 3.0 + names.index(n.name) if n.name in names else 0.0 for n in given}
    inputs = [torch.tensor(x, dtype=n.meta["val"].dtype) for n, x in values.items()]
    found = OnCPU(fx.GraphModule({}, graph)).transform()(*inputs)
    return torch.cat([x.double().flatten() for x in found]).view(-1, each)


ALL_OF_THE_CPU, ONE_THAT_IS_THERE = 0.01, torch.tensor(0.01)


@pytest.mark.parametrize(
    ("groups", "of_each", "first"),
    [(1, 5, ALL_OF_THE_CPU), (2, 3, ONE_THAT_IS_THERE), (9, 1, ALL_OF_THE_CPU), (1, 1, ONE_THAT_IS_THERE)],
    ids=str,
)
def test_rates_of_the_cpu_for_parameters_elsewhere(pairs, groups, of_each, first):
    """They are not copied one by one, and what is computed of them is the same."""
    rates = [first, *(0.01 * i for i in range(2, groups + 1))]
    opt = torch.optim.AdamW(
        [
            {"params": make_parameters([(70, 70)] * of_each), "lr": rate, "weight_decay": 0.1 * (i + 1)}
            for i, rate in enumerate(rates)
        ]
    )
    plan = fp8compile.explain(opt.step).plans[-1]  # of a twin on the meta device
    assert [u.reason for u in plan.updates] == [""]
    before, after = pairs[-1]
    torch.testing.assert_close(numbers_of(after), numbers_of(before), rtol=1e-6, atol=0)
    read = [n for n in before.nodes if n.op == "placeholder" and n.meta["val"].dim() == 0]
    assert {n.meta["val"].device.type for n in read} == {"cpu", "meta"}, "rates, and counts"
    (update,) = after.find_nodes(op="call_function", target=state_ops.update_parameters)
    (matrix,) = update.args[2]
    assert matrix.meta["val"].device.type == "meta"
    copies = [n for n in after.nodes if n.target is torch.ops.prims.device_put.default]
    assert len(copies) == (2 if groups > batch_scalars.LAUNCHED_WITH else 0), "rates, and decays"
    assert all(n.args[2] for n in copies), "nothing waits for them"


@pytest.fixture
def graphs(monkeypatch) -> list[fx.Graph]:
    """Graphs as the pass leaves them."""
    seen: list[fx.Graph] = []
    look_after(monkeypatch, "batch_scalars", lambda c: seen.append(c.graph))
    return seen


@pytest.fixture
def stacker() -> tuple[batch_scalars.NumberStacker, Callable[..., fx.Node]]:
    """For parameters on the meta device, in a graph of its own; and what adds an operator, or a number, to it."""
    graph, mode = fx.Graph(), FakeTensorMode()
    place = graph.output(())

    def node(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(place):
            made = graph.placeholder(args[0]) if target is None else graph.call_function(target, args)
        if target is None:
            with mode:
                made.meta["val"] = torch.empty((), device=args[1])
        else:
            update_value(made)
        return made

    return batch_scalars.NumberStacker(graph, place, torch.device("meta")), node  # under no mode, as Inductor runs it


def test_numbers_of_two_devices_come_together(stacker):
    stacks, node = stacker
    there, ours, other = node(None, "there", "meta"), node(None, "ours", "cpu"), node(None, "other", "cpu")
    found = stacks.vector([node(aten.sqrt.default, n) for n in (there, ours, there, other)])
    assert value(found).device.type == "meta"
    assert value(found).shape == (4,)
    (stack,) = stacks.graph.find_nodes(op="call_function", target=state_ops.stack)
    assert {value(n).device.type for n in stack.args[0]} == {"meta"}, "torch.stack takes no others"


def test_runs_of_numbers_that_cannot_be_computed_stacked(stacker):
    stacks, node = stacker
    ours, other = node(None, "ours", "cpu"), node(None, "other", "cpu")
    column = [node(aten.mul.Tensor, node(aten.expand.default, n, []), 2.0) for n in (ours, ours, other)]
    found = stacks.vector(column)
    assert value(found).device.type == "meta"
    assert value(found).shape == (3,)
    full = [n.args[0] for n in stacks.graph.find_nodes(op="call_function", target=aten.full.default)]
    assert full == [[2], [1]]


def test_formulas_stay_short(stacker):
    stacks, node = stacker
    x = y = node(None, "x", "cpu")
    for _ in range(60):
        x, y = node(aten.mul.Tensor, x, x), node(aten.mul.Tensor, y, y)
    assert stacks.formula(x) == stacks.formula(y)
    assert len(repr(stacks.formula(x))) < 20
    assert stacks.formula(x) != stacks.formula(node(aten.mul.Tensor, x, y))


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
