"""Non-finite in, non-finite out: an overflow in a batch or in a gradient reaches every gradient, and GradScaler."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import delayed

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


class Looked:
    """What a compiled model makes of batches and gradients, each of which finds it as it was made."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        self.model, self.compiled = compiled_model(recipe)
        self.of_inputs = {str(bad): self._step(batch(bad)) for bad in (None, INF, -INF, NAN)}
        self.of_gradients = {str(bad): self._step(batch(), bad) for bad in (INF, NAN)}
        x = batch()
        self.clean = self._output(x)
        x[5, 7] = INF
        self.spoiled = self._output(x)
        self.model.zero_grad()
        delayed.reset()
        self.scaled = self._scaled_steps()
        self.plans = fp8compile.compiles()

    def _output(self, x: torch.Tensor) -> torch.Tensor:
        delayed.reset()
        return self.compiled(x).detach()

    def _step(self, x: torch.Tensor, bad: float | None = None) -> tuple[bool, bool, list[str]]:
        """Whether output and loss are finite, and the parameters whose gradients are not; `bad` is in the gradient."""
        delayed.reset()
        self.model.zero_grad()
        out = self.compiled(x)
        loss = out.square().mean()
        if bad is None:
            loss.backward()
        else:
            gradient = torch.ones_like(out)
            gradient[3, 4] = bad
            out.backward(gradient)
        names = [n for n, p in self.model.named_parameters() if not torch.isfinite(p.grad).all()]
        return bool(torch.isfinite(out).all()), bool(torch.isfinite(loss)), names

    def _scaled_steps(self) -> list[tuple[float, dict[str, torch.Tensor]]]:
        """The scale and the parameters after each of three steps, of which the second overflows."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = []
        for bad in (None, INF, None):
            optimizer.zero_grad()
            scaler.scale(self.compiled(batch(bad)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append((scaler.get_scale(), {n: p.detach().clone() for n, p in self.model.named_parameters()}))
        return found


PARAMETERS = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
looked = functools.cache(Looked)  # a recipe is compiled once


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_finite_batch_has_finite_loss_and_gradients(recipe):
    found = looked(recipe)
    assert found.of_inputs["None"] == (True, True, [])
    (plan,) = found.plans  # for all that is looked at
    assert len(plan.converted) == 5


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_non_finite_input_makes_loss_and_gradients_non_finite(recipe, bad):
    assert looked(recipe).of_inputs[str(bad)] == (False, False, PARAMETERS)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_that_overflows_reaches_every_weight_before_it(recipe, bad):
    assert looked(recipe).of_gradients[str(bad)] == (True, True, PARAMETERS)


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "blockwise"])
def test_other_tokens_keep_their_results_where_scales_are_per_token(recipe):
    clean, out = looked(recipe).clean, looked(recipe).spoiled
    others = [i for i in range(16) if i != 5]
    assert not torch.isfinite(out[5]).any()
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("recipe", RECIPES)
def test_grad_scaler_skips_the_step_and_halves_its_scale(recipe):
    (first, trained), (second, skipped), (third, trained_again) = looked(recipe).scaled
    assert (first, second, third) == (1024.0, 512.0, 512.0)
    assert all(torch.equal(trained[n], skipped[n]) for n in trained)
    assert all(not torch.equal(skipped[n], trained_again[n]) for n in trained)  # and the run recovers
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
