"""What backward computes again is made of little: a residual stream that could be summed up from the start is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Case
from torch import Tensor, fx, nn

import fp8compile
from fp8compile.passes.save import save_budget
from fp8compile.torch_hooks import partitioner

LAYERS, ROWS, WIDTH = 8, 128, 64


class Gated(nn.Module):
    """Each layer adds its output through a gate, whose gradient needs that output: it is kept in any case."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.gates = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for gate, linear in zip(self.gates, self.linears, strict=True):
            x = x + gate * linear(nn.functional.layer_norm(x, (WIDTH,)))
        return x


def backward_of(monkeypatch: pytest.MonkeyPatch, layers: int = LAYERS, **options: Any) -> fx.Graph:
    """The backward half of a `Gated`, after its gradients were compared with those in BF16."""
    found: list[fx.Graph] = []
    torch.compiler.reset()
    partition: Callable[..., Any] = partitioner._partition

    def keep(*given: Any) -> Any:
        halves = partition(*given)
        found.append(halves[1].graph)
        return halves

    monkeypatch.setattr(partitioner, "_partition", keep)
    torch.manual_seed(0)
    case = Case(
        Gated(layers).bfloat16(), {"x": torch.randn(ROWS, WIDTH).bfloat16()}, lambda y: y.float().square().mean(), 0
    )
    gradients = []
    for run in (case.model, torch.compile(case.model, backend="fp8", options={**EAGER, **options})):
        case.model.zero_grad()
        case.loss(run(**case.inputs)).backward()
        gradients.append([p.grad.clone() for p in case.model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).float().norm() < 0.15 * a.float().norm()
    return found[-1]


EAGER = {"executor": "eager", "select": "all", "strict": True, "save_min_bytes": 0}


def most_read(backward: fx.Graph) -> int:
    """Of how many activations that were kept a value of forward is computed again, at most."""
    leaves: dict[fx.Node, set[fx.Node]] = {}
    for node in backward.nodes:
        if node.op == "placeholder" and "tangents" not in str(node.target):
            leaves[node] = {node} if tuple(getattr(node.meta["val"], "shape", ())) == (ROWS, WIDTH) else set()
        elif node.op == "call_function" and all(i in leaves for i in node.all_input_nodes):
            leaves[node] = set().union(*(leaves[i] for i in node.all_input_nodes))
    return max(map(len, leaves.values()))


@pytest.mark.parametrize("save", ["fp8", "bf16"])
def test_no_layer_sums_up_all_that_came_before(monkeypatch: pytest.MonkeyPatch, save: str) -> None:
    near = most_read(backward_of(monkeypatch, save=save))
    saved = sum(row.bytes for row in fp8compile.last_compile().saved)
    monkeypatch.setattr(save_budget, "find_far", lambda *given: set())
    far = most_read(backward_of(monkeypatch, save=save))
    assert far >= LAYERS - 1, "the model is no longer one whose stream a minimum cut would sum up"
    assert near <= 5
    assert saved < 1.35 * sum(row.bytes for row in fp8compile.last_compile().saved)


def test_a_budget_may_still_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below what is kept by default, values that take memory run again, however much they read."""
    backward_of(monkeypatch)
    usual = sum(row.bytes for row in fp8compile.last_compile().saved)
    backward_of(monkeypatch, activation_budget=int(0.85 * usual))
    assert sum(row.bytes for row in fp8compile.last_compile().saved) <= 0.85 * usual


def test_no_kernel_reads_more_the_more_layers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the gradient of the stream added up anew for every layer."""
    largest = []
    for layers in (LAYERS // 2, LAYERS):
        backward_of(monkeypatch, layers)
        largest.append(max(kernel.moved for kernel in fp8compile.last_compile().kernels))
    assert largest[1] <= 1.05 * largest[0]
