"""Nested compile regions on a GPU: generated kernels run inside the graph of a region, which several layers share."""

from __future__ import annotations

import pytest
import torch

import fp8compile
from tests.torch_hooks.test_nested import Nested, Plain, assert_close, batch, gradients, stack

pytestmark = [pytest.mark.gpu]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["mixed", "blockwise"])
def test_a_step_is_that_of_layers_without_regions(recipe: str, mode: str | None) -> None:
    torch.compiler.reset()
    model, plain, x = stack(Nested).cuda(), stack(Plain).cuda(), batch(256).cuda()
    options = {"recipe": recipe, "select": "all", "strict": True, "save_min_bytes": 0}
    call = torch.compile(model, backend="fp8", options=options | ({"mode": mode} if mode else {}))
    expected = gradients(plain, plain, x)
    for _ in range(3):
        assert_close(gradients(call, model, x), expected)
    plan = fp8compile.last_compile()
    assert len(plan.converted) == 11
    assert sum(len(half.kernels) for graph in plan.plans for half in graph.halves.values()) > 0
