"""A load of what a store of the same graph made is what was stored, in the dtype that the load has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.optimizer import state_ops
from fp8compile.options import Options
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer import store_load_forwarding


def traced(stored: torch.dtype, loaded: torch.dtype) -> tuple[fx.GraphModule, Tensor]:
    def step(x: Tensor) -> Tensor:
        payload, side = state_ops.store_state(x, None, None, "log", "nearest")
        return state_ops.load_state(payload, side, "log", loaded) * 3

    x = torch.randn(4, 128).to(stored)
    return make_fx(step)(x), x


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_is_loaded_has_the_dtype_of_the_load(stored: torch.dtype, loaded: torch.dtype) -> None:
    gm, x = traced(stored, loaded)
    store_load_forwarding.run(OptimizerGraph(gm.graph, Options.parse(None), None))
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=state_ops.load_state)
    assert not gm.graph.find_nodes(op="call_function", target=state_ops.store_state)
    result = gm(x)
    assert result.dtype == loaded
    assert torch.equal(result, x.to(loaded) * 3)
