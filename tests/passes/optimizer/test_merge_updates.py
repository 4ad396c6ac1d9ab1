"""Copies that a merged update makes unnecessary, where the graph goes on using what they return."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.kernels.reference import state_reference
from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.optimizer import merge_updates

SHAPE = (32, 256)


def momentum(p: Tensor, g: Tensor, payload: Tensor, side: Tensor) -> tuple[list[Tensor], Tensor]:
    """A step with a momentum that is kept in 8 bits: its copies, and the new parameter."""
    m = state_ops.load_state(payload, side, "log", torch.float32)
    new = aten.add.Tensor(aten.mul.Tensor(m, 0.9), g)
    stored = state_ops.store_state(new, None, None, "log", "nearest")
    moved = aten.sub.Tensor(p, aten.mul.Tensor(new, 0.1))
    return [aten.copy_.default(*pair) for pair in ((p, moved), (payload, stored[0]), (side, stored[1]))], moved


def returned(*inputs: Tensor) -> tuple[Tensor, ...]:
    copies, moved = momentum(*inputs)
    return (*copies, aten.mul.Tensor(moved, 2.0))


def read(*inputs: Tensor) -> tuple[Tensor, ...]:
    copies, _ = momentum(*inputs)
    return (copies[0], aten.mul.Tensor(copies[0], 2.0))


def given() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return [p, g, *state_reference.encode(m, "log", None)]


@pytest.mark.parametrize("step", [returned, read])
def test_what_a_copy_returns_is_still_there(step: Callable[..., tuple[Tensor, ...]]) -> None:
    gm = make_fx(step, tracing_mode="fake")(*given())
    before = fx.GraphModule({}, fx.Graph())
    before.graph.output(before.graph.graph_copy(gm.graph, {}))
    (row,) = merge_updates.run(gm.graph)
    assert not row.reason
    assert not gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    gm.graph.lint()
    gm.recompile()
    before.recompile()
    mine, theirs = given(), given()
    results, wanted = gm(*mine), before(*theirs)
    for x, y in zip((*results, *mine), (*wanted, *theirs), strict=True):
        assert torch.equal(x, y)
    assert results[0] is mine[0]  # as a copy returns what it has written to
