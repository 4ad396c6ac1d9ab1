"""What forward keeps for backward: fewer bytes than torch's own cut, no FP8 copies of weights, no matmul run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ZOO
from torch import fx, nn
from torch._functorch import partitioners

from fp8compile import backend, ops, partitioner
from fp8compile.formats import FP8_DTYPES

NAMES = ["llama", "gpt2", "vit", "t5", "mlp", "cnn", "checkpoint"]


def cut(case: Any, monkeypatch: pytest.MonkeyPatch, own: bool = True) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """(forward, backward, number of the forward's own outputs) of a model's largest graph."""
    found: list[Any] = []
    ours: Callable[..., Any] = partitioner._partition

    def partition(gm: fx.GraphModule, joint_inputs: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        whole = len(list(gm.graph.nodes))
        by = ours if own else lambda g, i, k, *_: partitioners.min_cut_rematerialization_partition(g, i, **k)
        halves = by(gm, joint_inputs, kwargs, *rest)
        found.append((whole, *halves, kwargs["num_fwd_outputs"]))
        return halves

    monkeypatch.setattr(partitioner, "_partition", partition)
    torch.compiler.reset()
    options = {"executor": "eager", "select": "all", "strict": True, "kernels": "inductor"}
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
def test_saves_no_more_bytes_than_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = []
    for own in (True, False):
        case = ZOO[name]()
        with monkeypatch.context() as patch:
            forward, _, outputs = cut(case, patch, own)
        weights = parameters(forward, case.model)
        kept = [n.meta["val"] for n in saved(forward, outputs) if n not in weights]
        amounts.append(sum(x.numel() * x.itemsize for x in kept if isinstance(x, torch.Tensor)))
    assert amounts[0] <= 1.02 * amounts[1]  # a little more where statistics are saved that torch computes again


@pytest.mark.parametrize("name", NAMES)
def test_no_matmul_and_no_attention_runs_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO[name]()
    forward, backward, _ = cut(case, monkeypatch)
    if name == "checkpoint":
        return  # asked for
    dear = {n.name for n in forward.graph.nodes if n.target is ops.scaled_mm or "attention" in str(n.target)}
    assert dear & {n.name for n in backward.graph.nodes if n.op == "call_function"} == set()


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "t5"])
def test_no_fp8_copy_of_a_weight_is_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO[name]()
    forward, _, outputs = cut(case, monkeypatch)
    weights = parameters(forward, case.model)
    for node in saved(forward, outputs):
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


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_graph_without_fp8_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(partitioner, "_partition", lambda *a: called.append(True))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = torch.compile(model, backend="fp8", options={"executor": "eager"})
    run(torch.randn(2, 4)).sum().backward()
    assert called == []
    assert backend.Partitioner is partitioner.Partitioner
