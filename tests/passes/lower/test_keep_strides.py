"""What attention reads keeps its strides; symbolic ones are nodes of the graph where torch orders nodes."""

from __future__ import annotations

import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.inductor_prims import force_stride_order
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad, scaled_dot_product_attention

from fp8compile.passes.lower.keep_strides import ARE_NODES, keep_strides


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


@pytest.mark.skipif(not ARE_NODES, reason="this torch cannot order strides that are nodes")
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


def test_what_is_computed_behind_attention_is_not_read_before_it() -> None:
    """A graph may compute a stride for something else, later."""

    def late(x: Tensor) -> tuple[Tensor, Tensor]:
        y = attention(x)
        return y, x.new_zeros(x.shape[1] * 64)

    gm = make_fx(late, tracing_mode="symbolic")(torch.randn(3, 24, 64))
    keep_strides(gm.graph)
    gm.graph.lint()
    assert len(gm.graph.find_nodes(op="call_function", target=force_stride_order)) == 3


class Filled(nn.Module):
    """Attention over all tokens, filled up to a multiple of 16: of a symbolic length, strides are a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        n = -(-tokens.shape[0] // 16) * 16
        filled = pad(tokens, (0, 0, 0, n - tokens.shape[0]))
        q, k, v = (y.reshape(1, n, 4, 16).transpose(1, 2) for y in self.qkv(filled).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v)


def test_lengths_that_are_filled_up_compile() -> None:
    model = Filled().bfloat16()
    call = torch.compile(model, backend="fp8", dynamic=True, options={"strict": True, "select": "all"})
    with inductor_config.patch(force_disable_caches=True):
        for shape in ((4, 90, 64), (3, 163, 64)):
            x = torch.randn(shape).bfloat16()
            assert sqnr(model(x), call(x)) > 20  # of one matmul in FP8, three mantissa bits: 25 dB or more
            call(x).float().square().mean().backward()
