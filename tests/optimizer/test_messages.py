"""What is said of optimizers: once, true, and with what to do."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from optimizers import EAGER, make_parameters, relative, set_gradients
from torch import Tensor

import fp8compile
from fp8compile.errors import Fp8Error, Fp8Warning, OptionError
from fp8compile.options import Options

FORMATS = [
    "log", "log/stochastic", "e4m3", "e4m3/stochastic", "e4m3/linear", "e4m3/linear/stochastic", "e5m2",
    "e5m2/stochastic", "e5m2/linear", "e5m2/linear/stochastic", "float32",
]  # fmt: skip


class Factored(torch.optim.Optimizer):
    """Scales a gradient by the roots of its rows' means, as Adafactor and CAME do: no update of it can be merged."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["rows"] = torch.zeros_like(p), torch.zeros(len(p), 1, dtype=p.dtype)
            state["rows"].lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
            state["m"].lerp_(p.grad / (state["rows"] + 1e-3).sqrt(), 0.1)
            p.sub_(state["m"], alpha=0.01)


def said_by(opt: torch.optim.Optimizer, parameters: list[Any], states: Any = None) -> list[str]:
    """The warnings of three compiled steps."""
    step = torch.compile(opt.step, backend="fp8", options={**EAGER, "states": states})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for i in range(3):
            set_gradients(parameters, i)
            step()
    return [str(w.message) for w in caught if issubclass(w.category, Fp8Warning)]


def test_updates_that_are_not_merged_are_one_warning() -> None:
    """However many parameters and shapes there are. Nothing is said of BF16 where there is none."""
    parameters = make_parameters([(64, 96), (96, 64), (96, 64), (128, 80)])
    (message,) = said_by(Factored(parameters, {}), parameters)
    assert "4 parameter updates" in message
    assert "a tensor of shape [128, 1], its own is [128, 80], others likewise" in message
    assert "BF16" not in message


@pytest.mark.parametrize("rounding", ["nearest", "split"])
def test_rounding_that_was_asked_for_and_is_not_done_is_said(rounding: str) -> None:
    parameters = make_parameters([(64, 96), (96, 64)], torch.bfloat16)
    messages = said_by(Factored(parameters, {}), parameters, {"parameters": rounding})
    told = [m for m in messages if "operator by operator" in m]
    assert len(told) == 1
    assert ("rounded to nearest, not 'split'" in told[0]) == (rounding == "split")


@pytest.mark.parametrize("given", ["int8", {"first": "int8"}, {"formats": {"exp_avg": "int8"}}])
def test_an_unknown_state_format_lists_all(given: Any) -> None:
    with pytest.raises(OptionError, match="unknown state format 'int8'") as error:
        Options.parse({"states": given}, None)
    listed = str(error.value).split("Valid: ")[1].rstrip(".").split(", ")
    assert listed == sorted(FORMATS)
    for name in FORMATS:
        Options.parse({"states": name}, None)


@pytest.mark.parametrize(("given", "said"), [("e4m3/linea", "'e4m3/linear'"), ("log/stochastik", "'log/stochastic'")])
def test_the_nearest_state_format_is_a_whole_one(given: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"Did you mean {said}"):
        Options.parse({"states": given}, None)


def test_explain_of_a_step_that_calls_the_model() -> None:
    opt = torch.optim.LBFGS(make_parameters())
    with pytest.raises(Fp8Error, match=r"LBFGS\.step needs a closure.*compile the model that"):
        fp8compile.explain(opt.step)


class NeedsGradients(torch.optim.Optimizer):
    """Takes its gradients as an argument."""

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        for p, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            p.sub_(gradient)


def test_explain_of_a_step_with_another_argument() -> None:
    with pytest.raises(Fp8Error, match=r"NeedsGradients\.step needs 'gradients'"):
        fp8compile.explain(NeedsGradients(make_parameters(), {}).step)


@pytest.mark.parametrize("order", ["scheduler first", "bound"])
def test_a_scheduler_and_a_compiled_step(order: str) -> None:
    """The two orders that the documentation shows; without them torch's schedulers fail."""
    (mine,), (theirs,) = make_parameters([(64, 96)]), make_parameters([(64, 96)])
    opt, reference = torch.optim.AdamW([mine], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    options = {**EAGER, "states": "float32"}
    if order == "bound":
        opt.step = types.MethodType(torch.compile(type(opt).step, backend="fp8", options=options), opt)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    if order == "scheduler first":
        opt.step = torch.compile(opt.step, backend="fp8", options=options)
    theirs_too = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        for i in range(4):
            set_gradients([mine], i)
            set_gradients([theirs], i)
            opt.step()
            scheduler.step()
            reference.step()
            theirs_too.step()
    assert isinstance(opt.state[mine]["exp_avg"], fp8compile.FP8State)
    assert relative(mine, theirs) < 2e-6
