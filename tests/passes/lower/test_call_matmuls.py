"""FP8 matmuls as calls of the library, where numbers of rows are symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelines import look_before_stage
from torch import Tensor, nn

from fp8compile import ops
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.passes.lower.call_matmuls import call_matmuls

OPTIONS = {"select": "all", "executor": "eager", "strict": True}


def in_fp32(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any, result: Any, dtype: torch.dtype, fast: bool
) -> Tensor:
    """What cuBLAS computes, and asks for: not every CPU multiplies rows that have scales."""
    assert result is None
    assert a.stride(1) == b.stride(0) == 1, "FP8 units want rows and columns"
    sizes = (a.shape[0], 1), (1, b.shape[1])
    assert all(s.shape in (size, ()) and s.is_contiguous() for s, size in zip((scale_a, scale_b), sizes, strict=True))
    product = (a.float() * scale_a) @ (b.float() * scale_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def trained(model: nn.Module, recipe: str, rows: list[int]) -> list[Tensor]:
    """Outputs and gradients of batches of several numbers of rows."""
    torch.compiler.reset()
    run = torch.compile(model, backend="fp8", dynamic=True, options={**OPTIONS, "recipe": recipe})
    found = []
    for n in rows:
        x = torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "tensorwise"])
def test_any_number_of_rows_is_called(monkeypatch, recipe):
    """`mixed` repeats one scale for each row; of a batch that is padded too."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48)).bfloat16()
    rows = [32, 48, 20, 7]
    expected = trained(model, recipe, rows)
    called: list[int] = []

    def look(c: HalfGraph) -> None:
        asked = len(list(c.graph.find_nodes(op="call_function", target=ops.scaled_mm)))
        call_matmuls(c.graph)
        c.graph.lint()
        assert not list(c.graph.find_nodes(op="call_function", target=ops.scaled_mm))
        calls = list(c.graph.find_nodes(op="call_function", target=aten._scaled_mm.default))
        assert len(calls) == asked
        for node in calls:
            node.target = in_fp32
        called.append(len(calls))

    look_before_stage(monkeypatch, Stage.HALF, look)
    got = trained(model, recipe, rows)
    assert called == [2, 4]
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 0.002 * b.float().norm()
