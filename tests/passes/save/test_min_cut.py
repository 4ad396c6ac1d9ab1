"""What forward keeps for backward: fewer bytes than torch's own cut, no FP8 copies of weights, no matmul run again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import ZOO
from torch import fx, nn
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import compile_graph, ops
from fp8compile.formats import FP8_DTYPES
from fp8compile.passes.save.min_cut import Halves, plan_saved
from fp8compile.torch_hooks import partitioner

NAMES = ["llama", "t5", "mlp", "cnn", "checkpoint"]


@dataclass(frozen=True)
class Cut:
    """Forward and backward of a model's largest graph, and how many outputs of the forward half are its own."""

    model: nn.Module
    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int


@functools.cache
def cuts(name: str) -> tuple[Cut, Cut]:
    """Ours, and torch's own of the same joint graph, once a model."""
    case, found = ZOO[name](), list[tuple[int, Cut, Cut]]()
    ours: Callable[..., Any] = partitioner._partition

    def partition(gm: fx.GraphModule, joint_inputs: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        by_torch = partitioners.min_cut_rematerialization_partition(copy.deepcopy(gm), joint_inputs, **kwargs)
        size, by_us = len(gm.graph.nodes), ours(gm, joint_inputs, kwargs, *rest)
        found.append((size, *(Cut(case.model, *by, kwargs["num_fwd_outputs"]) for by in (by_us, by_torch))))
        return by_us

    options = {"executor": "eager", "select": "all", "strict": True, "kernels": "inductor"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "_partition", partition)
        run = torch.compile(case.model, backend="fp8", options=options)
        case.loss(run(**case.inputs)).backward()
    return max(found, key=lambda f: f[0])[1:]


def saved(forward: fx.GraphModule, outputs: int) -> list[fx.Node]:
    """What the forward half returns for the backward half."""
    return [n for n in forward.graph.output_node().args[0][outputs:] if isinstance(n, fx.Node)]  # type: ignore[index]


def parameters(forward: fx.GraphModule, model: nn.Module) -> set[fx.Node]:
    shapes = {tuple(p.shape) for p in model.parameters()}
    return {
        n for n in forward.graph.find_nodes(op="placeholder") if tuple(getattr(n.meta["val"], "shape", ())) in shapes
    }


@pytest.mark.parametrize("name", NAMES)
def test_saves_no_more_bytes_than_torch_does(name: str) -> None:
    amounts = []
    for cut in cuts(name):
        weights = parameters(cut.forward, cut.model)
        kept = [n.meta["val"] for n in saved(cut.forward, cut.outputs) if n not in weights]
        amounts.append(sum(x.numel() * x.itemsize for x in kept if isinstance(x, torch.Tensor)))
    assert amounts[0] <= 1.02 * amounts[1]  # a little more where statistics are saved that torch computes again


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint"])  # which asks for it
def test_no_matmul_and_no_attention_runs_again(name: str) -> None:
    cut, _ = cuts(name)
    dear = {n.name for n in cut.forward.graph.nodes if n.target is ops.scaled_mm or "attention" in str(n.target)}
    assert dear & {n.name for n in cut.backward.graph.nodes if n.op == "call_function"} == set()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_no_fp8_copy_of_a_weight_is_saved(name: str) -> None:
    cut, _ = cuts(name)
    weights = parameters(cut.forward, cut.model)
    for node in saved(cut.forward, cut.outputs):
        if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dtype in FP8_DTYPES:
            assert not _roots(node) <= weights, node


def _roots(node: fx.Node) -> set[fx.Node]:
    """The inputs of the graph that `node` is computed from."""
    seen, stack = {node}, [node]
    while stack:
        fresh = [i for i in stack.pop().all_input_nodes if i not in seen]
        seen.update(fresh)
        stack += fresh
    return {n for n in seen if n.op == "placeholder"}


def test_an_input_of_a_checkpointed_region_is_kept() -> None:
    """torch 2.15 tags it like what the region computes, but nothing can compute it again."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, 1.0))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (y, tangent))
    graph.output((y, gradient))
    for node in (x, y, tangent, gradient):
        node.meta["val"] = torch.empty(4, 4)
    x.meta["recompute"] = y.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    halves = Halves({x}, {x, y}, {tangent, gradient}, set(), lambda node: True)
    assert plan_saved(graph, halves) == [x]


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_graph_without_fp8_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(partitioner, "_partition", lambda *a: called.append(True))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = torch.compile(model, backend="fp8", options={"executor": "eager"})
    run(torch.randn(2, 4)).sum().backward()
    assert called == []
    assert compile_graph.Partitioner is partitioner.Partitioner
