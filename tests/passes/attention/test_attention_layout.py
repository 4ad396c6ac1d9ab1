"""Attention's output where its reader wants it: no copy forward, none backward, on a graph as a GPU would trace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import look_after
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.plan.reasons import Reason

BATCH, TOKENS, HEADS, DIM = 2, 128, 4, 64


class Attention(nn.Module):
    """cuDNN's attention as a GPU traces it, behind queries that a kernel computes (`turn`), or that are views."""

    def __init__(self, turn: bool = True, flatten: bool = True) -> None:
        super().__init__()
        self.turn, self.flatten = turn, flatten
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.turn:
            q, k = (torch.cat((t[..., 32:].float(), -t[..., :32].float()), -1).to(x.dtype) for t in (q, k))
        y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)[0]
        return self.out(y.transpose(1, 2).flatten(2)) if self.flatten else y.sum(1)


def in_bfloat16(build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def traced(monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[list[torch.fx.Node], fp8compile.plan.rows.Plan]:
    """The attentions of the joint graph behind the pass (forward first), and the plan."""
    found: list[torch.fx.Node] = []

    def look(c: Compilation) -> None:
        found[:] = [n for n in c.graph.nodes if "attention" in str(n.target)]

    look_after(monkeypatch, "attention_layout", look)
    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = in_bfloat16(lambda: Attention(**how))
        x = torch.empty(BATCH, TOKENS, HEADS * DIM, dtype=torch.bfloat16, requires_grad=True)
        options = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
        torch.compile(model, backend="fp8", options=options)(x)
    return found, fp8compile.last_compile().plans[-1]


def test_output_and_queries_lie_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    (forward, backward), plan = traced(monkeypatch)
    out = next(u for u in forward.users if u.args[1] == 0)
    tokens_first = torch.empty(BATCH, TOKENS, HEADS, DIM).transpose(1, 2).stride()
    assert value(out).stride() == value(forward.args[0]).stride() == tokens_first
    assert value(backward.args[4]).stride() == tokens_first  # the output that it is given
    assert value(next(u for u in backward.users if u.args[1] == 0)).stride() == tokens_first
    assert any(row.code == Reason.ATTENTION_OUTPUT for row in plan.saved)


@pytest.mark.parametrize("how", [{"turn": False}, {"flatten": False}])
def test_what_would_need_a_copy_is_left(monkeypatch: pytest.MonkeyPatch, how: dict[str, bool]) -> None:
    """Queries that are views already lie as they do; an output that is not read token by token is as good as it is."""
    (forward, *_), _ = traced(monkeypatch, **how)
    q = forward.args[0]
    assert q.target is not aten.permute.default or q.args[0].target is not aten.clone.default
