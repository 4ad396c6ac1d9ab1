"""Inputs of attention that its fused kernels refuse are copied before a kernel is picked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.passes.attention import attention_strides

HEADS, WIDTH, LENGTH = 2, 32, 24


def both_directions(x: Tensor) -> Tensor:
    """As transformers makes it: of the queries' positions, expanded along the keys."""
    n = x.shape[1]
    return (torch.arange(n, device=x.device)[None, None, :, None] >= 0).expand(len(x), -1, n, n)


def bias_of_queries(x: Tensor) -> Tensor:
    n = x.shape[1]
    return (torch.arange(n, device=x.device) * -0.1).to(x.dtype)[None, None, :, None].expand(len(x), HEADS, n, n)


class Attention(nn.Module):
    """channels_first: of queries that lie in memory as an image does, [b, c, n]."""

    def __init__(self, mask: Any = None, channels_first: bool = False, positional: bool = False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.channels_first, self.positional = mask, channels_first, positional

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (y.view(b, n, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.channels_first:
            q, k, v = (y.transpose(2, 3).contiguous().transpose(2, 3) for y in (q, k, v))
        mask = self.mask(x) if self.mask else None
        if self.positional:
            y = scaled_dot_product_attention(q, k, v, mask)
        else:
            y = scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


Inputs = list[tuple[Tensor | None, ...]]


class Seeing(fx.Interpreter):
    """Runs a graph, and those that it calls, and keeps what attention was called with."""

    def __init__(self, gm: fx.GraphModule, seen: Inputs):
        super().__init__(gm)
        self.seen = seen

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is scaled_dot_product_attention:
            given = dict(zip(attention_strides.INPUTS, args, strict=False)) | kwargs
            self.seen.append(tuple(given.get(name) for name in attention_strides.INPUTS))
        if isinstance(target, torch._ops.HigherOrderOperator):
            inner, *rest = args
            return Seeing(inner, self.seen).run(*rest)
        return super().call_function(target, args, kwargs)


def seen(model: nn.Module, dynamic: bool = False) -> Inputs:
    """What attention is called with; results are those of eager."""
    found: Inputs = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        attention_strides.run(gm)
        return Seeing(gm, found).run

    torch.compiler.reset()
    x = torch.randn(3, LENGTH, WIDTH)
    got = torch.compile(model, backend=backend, dynamic=dynamic)(x)
    torch.testing.assert_close(got, model(x), rtol=2e-5, atol=2e-5)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("mask", [both_directions, bias_of_queries])
def test_a_mask_that_is_expanded_along_the_keys(mask, positional, dynamic):
    ((*qkv, given),) = seen(Attention(mask, positional=positional), dynamic)
    assert given.stride()[-2:] == (LENGTH, 1)
    assert given.shape == (1, 1, LENGTH, LENGTH)  # broadcast by attention
    assert not any(x.is_contiguous() for x in qkv)  # they were fine


@pytest.mark.parametrize("dynamic", [False, True])
def test_queries_that_were_images(dynamic):
    ((*qkv, mask),) = seen(Attention(channels_first=True), dynamic)
    assert all(x.is_contiguous() for x in qkv)
    assert mask is None


def test_in_a_checkpoint():
    ((*_, given),) = seen(Checkpointed(both_directions))
    assert given.stride(-1) == 1


def test_what_fused_kernels_take_is_left():
    graphs = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        before = str(gm.graph)
        attention_strides.run(gm)
        graphs.append((before, str(gm.graph)))
        return gm.forward

    def causal(x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()

    for model in (Attention(), Attention(causal), Attention(lambda x: x[:, None, :, :1] > -99)):
        torch.compiler.reset()
        torch.compile(model, backend=backend)(torch.randn(3, LENGTH, WIDTH))
    assert len(graphs) == 3
    assert all(before == after for before, after in graphs)


@pytest.mark.parametrize("recipe", ["mixed", "blockwise"])
def test_attention_of_images_is_one_kernel(recipe):
    """On a CPU torch refuses the same queries: then there were matmuls of all scores, which stay in BF16."""
    torch.manual_seed(0)
    model = Attention(channels_first=True)
    options = {"executor": "eager", "select": "all", "save_min_bytes": 0, "strict": True, "recipe": recipe}
    run = torch.compile(model, backend="fp8", options=options)
    x = torch.randn(3, LENGTH, WIDTH)
    (y,) = torch.autograd.grad(run(x).square().sum(), [model.qkv.weight])
    (expected,) = torch.autograd.grad(model(x).square().sum(), [model.qkv.weight])
    plan = fp8compile.last_compile().plans[-1]
    assert len(plan.matmuls) == 5  # two layers; no gradient of x
    assert (y - expected).norm() < 0.2 * expected.norm()


def test_a_mask_that_hides_nothing_is_told():
    model = Attention(both_directions)
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "skip": ["*"], "strict": True})
    with pytest.warns(fp8compile.errors.Fp8Warning, match="NOTHING was converted"):
        run(torch.randn(3, LENGTH, WIDTH)).sum().backward()
    plan = fp8compile.last_compile().plans[-1]
    assert [(m.kind, m.shape) for m in plan.masks] == [("everything", (1, 1, LENGTH, LENGTH))]
