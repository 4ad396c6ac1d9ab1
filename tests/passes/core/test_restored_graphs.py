"""A graph that a failed pass has left out of order becomes what it was."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.passes.core.snapshot import copy_graph, restore_graph


def test_nodes_may_stand_behind_their_users() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    gm = make_fx(f)(torch.randn(3))
    backup = copy_graph(gm.graph)
    _, sin, cos, _ = gm.graph.nodes
    cos.append(sin)
    restore_graph(gm.graph, backup)
    gm.graph.lint()
    gm.recompile()
    x = torch.randn(3)
    assert torch.equal(gm(x), x.sin().cos())
