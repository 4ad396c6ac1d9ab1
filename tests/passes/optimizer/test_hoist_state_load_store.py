"""In Dynamo's graph of a step each 8-bit state is read once and written once, where it meets nothing but arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8compile.optimizer.states import FP8State
from fp8compile.passes.optimizer import hoist_state_load_store

Step = Callable[[fx.Graph, fx.Node, fx.Node], Any]


def graph_of(step: Step, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A module with a state `s` whose forward takes a gradient, as Dynamo would trace it."""
    graph, example = fx.Graph(), torch.zeros(4, 128, dtype=dtype)
    g = graph.placeholder("g")
    s = graph.get_attr("s")
    g.meta["example_value"] = s.meta["example_value"] = example
    graph.output(step(graph, s, g))
    torch.manual_seed(0)
    return fx.GraphModule({"s": FP8State.of(torch.rand(4, 128, dtype=dtype), format="log")}, graph)


def methods(gm: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_method")


def on_state(gm: fx.GraphModule) -> list[str]:
    """What still operates on the state itself."""
    (state,) = gm.graph.find_nodes(op="get_attr")
    return [str(user.target) for user in state.users]


def adam(graph: fx.Graph, s: fx.Node, g: fx.Node) -> tuple[fx.Node]:
    graph.call_method("lerp_", (s, g, 0.1))
    decayed = graph.call_method("mul_", (s, 0.9))
    graph.call_method("addcmul_", (decayed, g, g))
    return (graph.call_method("sqrt", (s,)),)


def test_a_state_is_read_once_and_written_once() -> None:
    gm = graph_of(adam)
    hoist_state_load_store.run(gm)
    assert on_state(gm) == ["dequantize", "store"]
    assert methods(gm) == Counter(["dequantize", "store", "lerp_", "mul_", "addcmul_", "sqrt"])


def test_what_is_stored_is_the_unrounded_update() -> None:
    gm = graph_of(adam)
    g = torch.rand(4, 128)
    x = gm.s.dequantize()
    expected = x.lerp(g, 0.1).mul(0.9).addcmul(g, g)
    hoist_state_load_store.run(gm)
    (root,) = gm(g)
    assert torch.equal(root, expected.sqrt())
    assert torch.equal(gm.s.payload, FP8State.of(expected, format="log").payload)


def test_one_operation_stores_what_it_stored_before() -> None:
    g = torch.randn(4, 128)
    before, after = (graph_of(lambda graph, s, g: graph.call_method("lerp_", (s, g, 0.1))) for _ in range(2))
    hoist_state_load_store.run(after)
    before(g)
    after(g)
    assert torch.equal(before.s.payload, after.s.payload)
    assert torch.equal(before.s.side, after.s.side)


def test_lists_of_foreach_operators() -> None:
    gm = graph_of(lambda graph, s, g: graph.call_function(torch._foreach_lerp_, ([s], [g], 0.1)) and ())
    hoist_state_load_store.run(gm)
    assert on_state(gm) == ["dequantize", "store"]


def test_a_state_that_is_only_read_is_not_written() -> None:
    gm = graph_of(lambda graph, s, g: graph.call_method("add", (s, g)))
    hoist_state_load_store.run(gm)
    assert on_state(gm) == ["dequantize"]


def test_a_copy_in_the_dtype_of_the_state_is_arithmetic() -> None:
    def step(graph: fx.Graph, s: fx.Node, g: fx.Node) -> None:
        graph.call_method("mul_", (s, 0.5))
        graph.call_method("copy_", (s, g))

    gm = graph_of(step)
    hoist_state_load_store.run(gm)
    assert on_state(gm) == ["dequantize", "store"]


def view(graph: fx.Graph, s: fx.Node, g: fx.Node) -> fx.Node:
    return graph.call_method("view", (graph.call_method("mul_", (s, 0.5)), -1))


def returned(graph: fx.Graph, s: fx.Node, g: fx.Node) -> fx.Node:
    return graph.call_method("mul_", (s, 0.5))


def copied_from(graph: fx.Graph, s: fx.Node, g: fx.Node) -> fx.Node:
    return graph.call_method("copy_", (g, s))


def copied_in_other_dtype(graph: fx.Graph, s: fx.Node, g: fx.Node) -> None:
    g.meta["example_value"] = torch.zeros(4, 128, dtype=torch.float64)
    graph.call_method("copy_", (s, g))


def written_to(graph: fx.Graph, s: fx.Node, g: fx.Node) -> fx.Node:
    return graph.call_function(torch.sqrt, (g,), {"out": s})


@pytest.mark.parametrize("step", [view, returned, copied_from, copied_in_other_dtype, written_to])
def test_other_uses_leave_the_state_as_it_is(step: Step) -> None:
    gm = graph_of(step)
    before = on_state(gm)
    hoist_state_load_store.run(gm)
    assert on_state(gm) == before
    assert not methods(gm)["dequantize"]


def test_plain_tensors_are_none_of_its_business() -> None:
    gm = graph_of(lambda graph, s, g: graph.call_method("mul_", (g, 0.5)) and ())
    hoist_state_load_store.run(gm)
    assert methods(gm) == Counter(["mul_"])


def test_inputs_that_are_states() -> None:
    graph = fx.Graph()
    s = graph.placeholder("s")
    state = FP8State.of(torch.randn(4, 128), format="log")
    s.meta["example_value"] = state
    graph.call_method("mul_", (s, 0.5))
    graph.output(())
    gm = fx.GraphModule({}, graph)
    hoist_state_load_store.run(gm)
    x: Tensor = state.dequantize()
    gm(state)
    assert torch.equal(state.payload, FP8State.of(x * 0.5, format="log").payload)
