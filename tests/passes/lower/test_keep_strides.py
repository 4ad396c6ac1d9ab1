"""What attention reads keeps its strides, symbolic ones as nodes of the graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.inductor_prims import force_stride_order
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from fp8compile.passes.lower.keep_strides import keep_strides


def attention(x: Tensor) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (y.reshape(b, s, 4, 16).transpose(1, 2) for y in (x.sin(), x.cos(), x * 2))
    return scaled_dot_product_attention(q, k, v)


def kept(mode: str) -> tuple[fx.GraphModule, list[fx.Node]]:
    gm = make_fx(attention, tracing_mode=mode)(torch.randn(3, 24, 64))  # type: ignore[arg-type]
    keep_strides(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, list(gm.graph.find_nodes(op="call_function", target=force_stride_order))


def test_known_strides_are_numbers() -> None:
    gm, forced = kept("fake")
    assert [list(node.args[1]) for node in forced] == [[24 * 64, 16, 64, 1]] * 3
    x = torch.randn(3, 24, 64)
    torch.testing.assert_close(gm(x), attention(x))


def test_symbolic_strides_are_nodes() -> None:
    """torch warns of raw symbols among a node's arguments."""
    gm, forced = kept("symbolic")
    assert len(forced) == 3
    for node in forced:
        given = node.args[1]
        assert not any(isinstance(stride, torch.SymInt) for stride in given)
        assert any(isinstance(stride, fx.Node) for stride in given)
    x = torch.randn(5, 40, 64)
    torch.testing.assert_close(gm(x), attention(x))
