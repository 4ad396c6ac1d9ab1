"""Dynamic shapes on a GPU: generated kernels are launched with symbolic sizes, whatever the granularity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from regrouped_tokens import FORMS, Expanded, Regrouped
from torch import Tensor, nn

import fp8compile
from fp8compile.plan import store

pytestmark = [pytest.mark.gpu]
WIDTH = 256


class Uneven(nn.Module):
    """Matmuls of many widths read one norm: what merges, what is filled up, and what is too narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.even, self.odd = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 100)
        self.wide, self.gate = nn.Linear(WIDTH, 512), nn.Linear(WIDTH, 8)
        self.down, self.out = nn.Linear(512, WIDTH), nn.Linear(228, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weight = self.gate(h).softmax(-1).square().sum(-1, keepdim=True)
        both = torch.cat([self.even(h), self.odd(h).tanh()], -1)
        return x + self.down(F.silu(self.wide(h)) * weight) + self.out(both)


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "rowwise", "blockwise"])
def test_steps_of_several_lengths_are_those_of_bf16(recipe: str) -> None:
    torch.compiler.reset()
    store.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Uneven(), Uneven()).cuda().bfloat16()
    options = {"recipe": recipe, "select": "all", "strict": True, "save_min_bytes": 0}
    call = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for batch, length in ((4, 96), (3, 160), (7, 33)):
        x = torch.randn(batch, length, WIDTH, device="cuda", dtype=torch.bfloat16)
        mine, wanted = (_gradients(run, model, x) for run in (call, model))
        worst = min(sqnr(w, m) for w, m in zip(wanted, mine, strict=True))
        assert worst > 15, f"{worst:.1f} dB at {batch} × {length}"
    found = [plan for plan in fp8compile.compiles() if plan.converted]
    # Groups of the rows of a gradient: torch asks whether padding them to 16 and to 128 is the same, and guards that
    assert len(found) <= (2 if recipe == "blockwise" else 1)
    assert all(plan.kernels for plan in found)


def _gradients(run: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    run(x).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("form", [*FORMS, "expanded"])
def test_sizes_that_are_quotients(form: str) -> None:
    torch.compiler.reset()
    store.reset()
    torch.manual_seed(0)
    model = (Expanded() if form == "expanded" else Regrouped(form)).cuda().bfloat16()
    options = {"select": "all", "strict": True, "save_min_bytes": 0}
    call = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for rows in ((2, 48), (3, 8), (1, 44)):
        x = torch.randn(*rows, 64, device="cuda").bfloat16().requires_grad_()
        given = [x, *model.parameters()]
        got, wanted = (
            torch.autograd.grad(run(x).float().square().mean(), given, allow_unused=True) for run in (call, model)
        )
        for mine, exact in zip(got, wanted, strict=True):
            assert (mine is None) == (exact is None)
            assert exact is None or sqnr(exact, mine) > 12
    assert all(m.decision == "fp8" for m in fp8compile.last_compile().plans[0].matmuls)
