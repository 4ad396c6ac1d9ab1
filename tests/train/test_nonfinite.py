"""Non-finite in, non-finite out: an overflow in a batch or in a gradient reaches every gradient, and GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile

DELAYED = {"delayed": {"history": 4}}
RECIPES = {
    "mixed": "mixed",
    "rowwise": "rowwise",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "delayed": {
        "base": "tensorwise",
        "output": {"left": DELAYED, "right": DELAYED},
        "grad_input": {"left": DELAYED, "right": DELAYED},
        "grad_weight": {"left": DELAYED, "right": DELAYED},
    },
}
INF, NAN = float("inf"), float("nan")


def compiled_model(recipe: str) -> tuple[nn.Module, nn.Module]:
    """A small model, and the same compiled in FP8."""
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.LayerNorm(48), nn.Linear(48, 32))
    options = {"recipe": RECIPES[recipe], "select": "all", "executor": "eager", "strict": True}
    return model, torch.compile(model, backend="fp8", options=options)


def batch(bad: float | None = None) -> torch.Tensor:
    x = torch.randn(16, 32)
    if bad is not None:
        x[5, 7] = bad
    return x


def parameters_with_bad_gradients(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if not torch.isfinite(p.grad).all()]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_non_finite_input_makes_loss_and_gradients_non_finite(recipe, bad):
    model, compiled = compiled_model(recipe)
    loss = compiled(batch(bad)).square().mean()
    loss.backward()
    assert len(fp8compile.last_compile().converted) == 5
    assert not torch.isfinite(loss)
    assert parameters_with_bad_gradients(model) == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_finite_batch_has_finite_loss_and_gradients(recipe):
    model, compiled = compiled_model(recipe)
    loss = compiled(batch()).square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert parameters_with_bad_gradients(model) == []


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_that_overflows_reaches_every_weight_before_it(recipe, bad):
    model, compiled = compiled_model(recipe)
    out = compiled(batch())
    assert torch.isfinite(out).all()
    gradient = torch.ones_like(out)
    gradient[3, 4] = bad
    out.backward(gradient)
    assert parameters_with_bad_gradients(model) == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "blockwise"])
def test_other_tokens_keep_their_results_where_scales_are_per_token(recipe):
    _, compiled = compiled_model(recipe)
    x = batch()
    clean = compiled(x).detach()
    x[5, 7] = INF
    out = compiled(x).detach()
    others = [i for i in range(16) if i != 5]
    assert not torch.isfinite(out[5]).any()
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("recipe", RECIPES)
def test_grad_scaler_skips_the_step_and_halves_its_scale(recipe):
    model, compiled = compiled_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        scaler.scale(compiled(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    trained = step(batch())
    assert scaler.get_scale() == 1024.0
    skipped = step(batch(INF))
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(trained[n], skipped[n]) for n in trained)
    trained_again = step(batch())  # and the run recovers
    assert scaler.get_scale() == 512.0
    assert all(not torch.equal(skipped[n], trained_again[n]) for n in trained)
    assert all(torch.isfinite(p).all() for p in trained_again.values())


def test_grad_scaler_sees_a_loss_scale_that_overflows_in_backward():
    model, compiled = compiled_model("mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    loss = compiled(batch()).sum() * 8.0  # finite itself; its gradient, 2^130, is not
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(loss)
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
