"""Lengths that change: the graph of any length gives the bits that a graph of one length gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_quantized import sqnr
from regrouped_tokens import FORMS, Expanded, Regrouped
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile.passes.save import save_as_fp8

WIDTH, INNER, HEADS = 64, 96, 4
OPTIONS = {"select": "all", "executor": "eager", "strict": True, "save": "bf16"}  # what is kept is decided by sizes


class Block(nn.Module):
    """Attention under a mask of positions, and a gated MLP: gradients of three, and of two, are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down, self.norm = nn.Linear(INNER, WIDTH, bias=False), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=i[None, :] <= i[:, None])
        x = self.norm(x + self.out(y.transpose(1, 2).flatten(2)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_bits_are_those_of_a_graph_for_one_length() -> None:
    torch.manual_seed(0)
    model = Block().bfloat16()

    def step(dynamic: bool, x: Tensor) -> list[Tensor]:
        y = torch.compile(model, backend="fp8", dynamic=dynamic, options=OPTIONS)(x)
        return [y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])]

    batches = [torch.randn(*rows, WIDTH).bfloat16().requires_grad_() for rows in ((4, 32), (3, 13), (2, 9), (5, 48))]
    torch.compiler.reset()
    of_any_length = [step(True, x) for x in batches]
    (plan,) = fp8compile.last_compile().plans
    assert [m.kind for m in plan.masks] == ["causal"]
    assert {m.decision for m in plan.matmuls} == {"fp8"}
    for x, got in zip(batches, of_any_length, strict=True):
        torch.compiler.reset()
        for a, b in zip(got, step(False, x), strict=True):
            assert torch.equal(a, b)


class Cross(nn.Module):
    """torch's attention of one sequence to another: two inputs have one batch, and q, k, v one projection."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(32, HEADS, batch_first=True), need_weights

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attention(x, memory, memory, need_weights=self.need_weights)[0]


@pytest.mark.parametrize(("need_weights", "dynamic"), [(True, None), (False, None), (False, True)])
def test_cross_attention_of_torch(need_weights: bool, dynamic: bool | None) -> None:
    """Batch, queries and keys change; with `dynamic=None` the second batch makes the sizes symbolic."""
    model = Cross(need_weights)
    options = {**OPTIONS, "save": "auto", "save_min_bytes": 0}
    run = torch.compile(model, backend="fp8", dynamic=dynamic, options=options)
    for batch, queries, keys in ((4, 16, 7), (3, 17, 17), (1, 9, 30)):
        inputs = [torch.randn(batch, n, 32, requires_grad=True) for n in (queries, keys)]
        of = [*inputs, *model.parameters()]
        want, got = (torch.autograd.grad(f(*inputs).square().sum(), of) for f in (model, run))
        assert all(sqnr(w, g) > 12 for w, g in zip(want, got, strict=True) if w.dim() > 1)


class Pairs(nn.Module):
    """A product over triangles of a square of tokens: its sizes are read off views that the graph computes."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.a, self.b, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x[:, :, None].expand(-1, -1, x.shape[1], -1), x[:, None].expand(-1, x.shape[1], -1, -1)
        z = self.pair(rows.contiguous() + columns.contiguous())
        h = self.norm(z)
        z = z + self.out(torch.einsum("bikd,bjkd->bijd", self.a(h).sigmoid(), self.b(h)))
        return z + self.down(F.mish(self.up(self.norm(z))))


def test_sizes_of_views_are_computed_from_those_of_inputs() -> None:
    torch.manual_seed(0)
    model = Pairs().bfloat16()
    run = torch.compile(model, backend="fp8", options={**OPTIONS, "save": "auto", "save_min_bytes": 0})
    for rows in ((1, 16), (1, 24), (2, 16)):
        x = torch.randn(*rows, 32).bfloat16().requires_grad_()
        given = [x, *model.parameters()]
        got, wanted = (torch.autograd.grad(f(x).float().square().mean(), given) for f in (run, model))
        for a, b in zip(got, wanted, strict=True):
            assert sqnr(b, a) > 10


@pytest.mark.parametrize(
    ("form", "executor"), [*((form, "eager") for form in FORMS), ("patches", "inductor"), ("even and odd", "inductor")]
)
def test_lengths_that_are_quotients(form: str, executor: str) -> None:
    torch.manual_seed(0)
    model = Regrouped(form).bfloat16()
    options = {**OPTIONS, "save": "auto", "save_min_bytes": 0, "executor": executor}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for rows in ((2, 24), (3, 8), (1, 44)):
        x = torch.randn(*rows, 64).bfloat16().requires_grad_()
        given = [x, *(p for p in model.parameters())]
        got, wanted = (
            torch.autograd.grad(f(x).float().square().mean(), given, allow_unused=True) for f in (run, model)
        )
        for a, b in zip(got, wanted, strict=True):
            assert (a is None) == (b is None)
            assert b is None or sqnr(b, a) > 12
    assert all(m.decision == "fp8" for m in fp8compile.last_compile().plans[0].matmuls), fp8compile.last_compile()


def test_no_matmul_runs_again_for_the_size_of_its_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Expanded().bfloat16()
    options = {**OPTIONS, "save": "auto", "save_min_bytes": 0, "dump": str(tmp_path)}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for rows in ((2, 24), (3, 8)):
        x = torch.randn(*rows, 64).bfloat16().requires_grad_()
        given = [x, *model.parameters()]
        got, wanted = (torch.autograd.grad(f(x).float().square().mean(), given) for f in (run, model))
        assert all(sqnr(b, a) > 12 for a, b in zip(got, wanted, strict=True))
    (plan,) = fp8compile.last_compile().plans
    assert any(row.form.startswith("e4m3") for row in plan.saved)
    (backward,) = tmp_path.glob("**/*_backward_cut.txt")
    assert backward.read_text().count("fp8.scaled_mm(") == 4  # gradients of two layers


def test_a_cast_that_nobody_reads_any_more_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader was a matmul of which only a size was read: a region computes that from sizes of inputs."""
    real = save_as_fp8.run_again

    def with_sizes(graph: Any, saved: Any, halves: Any) -> Any:
        return real(graph, [node for node in saved if isinstance(node.meta["val"], Tensor)], halves)

    monkeypatch.setattr(save_as_fp8, "run_again", with_sizes)
    model = Expanded().bfloat16()
    run = torch.compile(model, backend="fp8", dynamic=True, options={**OPTIONS, "save": "auto", "save_min_bytes": 0})
    x = torch.randn(2, 24, 64).bfloat16().requires_grad_()
    got, wanted = (torch.autograd.grad(f(x).float().square().mean(), [x]) for f in (run, model))
    assert sqnr(wanted[0], got[0]) > 12
