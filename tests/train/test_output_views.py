"""Outputs that are views of one intermediate result, whatever layout its kernel or matmul gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, fx, nn

from fp8compile import backend
from fp8compile.output_strides import VISIBLE

VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "flat and transposed": lambda y: (y.flatten(0, -2), y.transpose(0, -1)),
    "halves": lambda y: tuple(y.chunk(2, -1)),
    "one row": lambda y: (y[0], y),
    "diagonal": lambda y: (y.diagonal(0, 0, 1), y.flatten()),
}


class Viewed(nn.Module):
    """A matmul with 100 columns, which FP8 units make 112 of, and views of its result."""

    def __init__(self, views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.linear, self.views = nn.Linear(48, 100, bias=False), views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.views(self.linear(x))


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_result(name: str, executor: str) -> None:
    torch.manual_seed(0)
    model = Viewed(VIEWS[name]).bfloat16()
    x = torch.randn(6, 8, 48).bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "executor": executor})
    got, wanted = run(x), model(x)
    assert [(o.shape, o.stride()) for o in got] == [(o.shape, o.stride()) for o in wanted]
    assert all(sqnr(w, g) > 20 for w, g in zip(wanted, got, strict=True))  # two casts of 31 dB, 28 dB, and some room
    sum(o.float().square().sum() for o in got).backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.isfinite().all()


def test_inductor_is_to_keep_the_strides_of_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[int]] = []
    compile_inner = backend.compile_fx_inner

    def seen(gm: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        if not settings.get("is_backward"):
            kept.append(set(gm.graph.output_node().meta[VISIBLE]))
        return compile_inner(gm, *args, **settings)

    monkeypatch.setattr(backend, "compile_fx_inner", seen)
    model = Viewed(VIEWS["flat and transposed"]).bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True})
    run(torch.randn(6, 8, 48).bfloat16())
    assert kept == [{0, 1, 2}]  # two views, and what they are views of
