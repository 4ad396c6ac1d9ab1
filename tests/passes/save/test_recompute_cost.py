"""What backward computes again is made of little: a residual stream that could be summed up from the start is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Kept:
    """backward: the half with that name. saved: bytes that it gets. moved: those of the kernel that moves most."""

    backward: fx.Graph
    saved: int
    moved: int


@functools.cache
def compiled(layers: int = LAYERS, far: bool = True, **options: Any) -> Kept:
    """What becomes of a `Gated`, after its gradients were compared with those in BF16. `far`: as always; else what
    reads too much is not looked for."""
    found: list[fx.Graph] = []
    torch.compiler.reset()
    partition: Callable[..., Any] = partitioner._partition

    def keep(*given: Any) -> Any:
        halves = partition(*given)
        found.append(halves[1].graph)
        return halves

    torch.manual_seed(0)
    case = Case(
        Gated(layers).bfloat16(), {"x": torch.randn(ROWS, WIDTH).bfloat16()}, lambda y: y.float().square().mean(), 0
    )
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "_partition", keep)
        if not far:
            patch.setattr(save_budget, "find_far", lambda *given: set())
        for run in (case.model, torch.compile(case.model, backend="fp8", options={**EAGER, **options})):
            case.model.zero_grad()
            case.loss(run(**case.inputs)).backward()
            gradients.append([p.grad.clone() for p in case.model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).float().norm() < 0.15 * a.float().norm()
    plan = fp8compile.last_compile()
    return Kept(found[-1], sum(row.bytes for row in plan.saved), max(kernel.moved for kernel in plan.kernels))


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
def test_no_layer_sums_up_all_that_came_before(save: str) -> None:
    near, far = compiled(save=save), compiled(save=save, far=False)
    assert most_read(far.backward) >= LAYERS - 1, "the model is no longer one whose stream a minimum cut would sum up"
    assert most_read(near.backward) <= 5
    assert near.saved < 1.35 * far.saved


def test_a_budget_may_still_ask_for_it() -> None:
    """Below what is kept by default, values that take memory run again, however much they read."""
    usual = compiled(save="fp8").saved
    assert compiled(save="fp8", activation_budget=int(0.85 * usual)).saved <= 0.85 * usual


def test_no_kernel_reads_more_the_more_layers_there_are() -> None:
    """Nor is the gradient of the stream added up anew for every layer."""
    assert compiled(save="fp8").moved <= 1.05 * compiled(LAYERS // 2, save="fp8").moved
