"""A half without FP8 is compiled as torch compiles it: its buffers, and no kernels of ours."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pipelines import run_half
from test_buffer_reuse import around_an_operator
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.passes.regions.region_graph import regions_of
from fp8compile.torch_hooks import inner_compiler

SIZES = (1024, 1024, 8, 16, 1024, 1024)  # what the first product leaves is free long before the fourth could take it
NO_FP8 = {"skip": ["*"], "strict": True}
ALL = {"select": "all", "strict": True}


class Products(nn.Module):
    """Products, with an operator between them that Inductor does not know."""

    def __init__(self) -> None:
        super().__init__()
        sizes = list(itertools.pairwise(SIZES))
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(k, n) / k**0.5) for k, n in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return around_an_operator(x, list(self.weights))


def code_of(**arguments: Any) -> str:
    torch.compiler.reset()
    run = torch.compile(Products(), **arguments)
    with torch.no_grad(), inductor_config.patch(inplace_buffers=False, force_disable_caches=True):
        _, (code,) = run_and_get_code(run, torch.randn(SIZES[0], SIZES[0]))
    return str(code)


@pytest.mark.filterwarnings("ignore:.*NOTHING was converted")
def test_only_graphs_with_fp8_use_buffers_again_with_caution(monkeypatch: pytest.MonkeyPatch) -> None:
    cautious: list[bool] = []
    compiling = inner_compiler.compiling_ours
    monkeypatch.setattr(inner_compiler, "compiling_ours", lambda has: cautious.append(has) or compiling(has))
    assert "# reuse" in code_of()
    assert "# reuse" in code_of(backend="fp8", options=NO_FP8)
    assert cautious == [False]
    with torch.no_grad():
        torch.compile(nn.Linear(32, 32, bias=False), backend="fp8", options=ALL)(torch.randn(16, 32))
    assert cautious == [False, True]


@pytest.mark.filterwarnings("ignore:.*NOTHING was converted")
def test_a_user_s_setting_wins() -> None:
    options = {**NO_FP8, "inductor": {"allow_buffer_reuse": False}}
    assert "# reuse" not in code_of(backend="fp8", options=options)


def normed(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The backward of a norm: a sum over rows beside sums along them, of which a region would be made."""
    return (gradient * x).sum(0), gradient * x - x * (gradient * x).sum(-1, keepdim=True)


def cast_as_well(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    sums, of_x = normed(x, gradient)
    return sums, of_x, ops.quantize(of_x, ops.scale(ops.amax(of_x, "row"), "e4m3"), "e4m3", "row")


@pytest.mark.parametrize("executor", ["operators", "triton"])
def test_kernels_are_generated_only_beside_fp8(executor: str) -> None:
    with FakeTensorMode():
        given = [torch.empty(256, 128) for _ in range(2)]
        plain, casting = (make_fx(step)(*given).graph for step in (normed, cast_as_well))
    before = copy.deepcopy(plain)
    run_half(plain, executor, "backward")
    assert [n.target for n in plain.nodes if n.op == "call_function"] == [
        n.target for n in before.nodes if n.op == "call_function"
    ]
    c = run_half(casting, "operators", "backward")
    assert regions_of(c.graph)
