"""Optimizers of whose steps torch compiles nothing, and those that are compiled because numbers may be read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from optimizers import EAGER
from torch import nn

import fp8compile
from fp8compile.errors import Fp8Warning

SIZE = 64
FP8: Any = {"backend": "fp8", "options": EAGER}
PLAIN: Any = {"backend": "fp8", "options": {**EAGER, "states": {"smallest": 1 << 30}}}
FUSED = ["Adam", "AdamW", "SGD", "Adagrad"]
# with states that stay plain torch's fused kernel is as good as ours
LEFT: Any = {"backend": "fp8", "options": {**EAGER, "states": "float32"}}


class ProdigyLike(torch.optim.Optimizer):
    """Estimates its step size, a number, from all parameters, as Prodigy (arXiv 2306.06101) does."""

    def __init__(self, params: Any, lr: float = 1.0):
        super().__init__(params, {"lr": lr, "d": 1e-3, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                total += state["exp_avg"].abs().sum().item()
        for group in self.param_groups:
            group["d"] = max(group["d"], 1e-4 * total)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
                    p.addcdiv_(state["exp_avg"], denominator, value=-group["d"] * group["lr"])
            group["k"] += 1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())


def gradients(m: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    m.zero_grad()
    m(torch.randn(8, SIZE)).square().mean().backward()


def messages(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, Fp8Warning)]


def compiled(opt: torch.optim.Optimizer, how: str, arguments: Any = FP8) -> Callable[..., Any]:
    if how == "bound":
        opt.step = MethodType(torch.compile(type(opt).step, **arguments), opt)  # type: ignore[method-assign]
        return opt.step
    return torch.compile(opt.step, **arguments)


@pytest.mark.parametrize(("name", "how"), [*zip(FUSED, ["method", "bound"] * 2, strict=True)])
def test_a_fused_step_is_said_once_with_the_cure(name: str, how: str) -> None:
    m = model()
    opt = getattr(torch.optim, name)(m.parameters(), lr=1e-2, fused=True)
    step, found = compiled(opt, how, LEFT), []
    for i in range(3):
        gradients(m, i)
        found += messages(step)
    (message,) = found
    assert f"nothing of {name}.step was compiled, and its states stay as they are" in message
    assert "foreach=True or fused=False" in message
    assert fp8compile.last_compile().failure in message
    assert "fused=True" in str(fp8compile.last_compile())
    assert all(type(x) is torch.Tensor for state in opt.state.values() for x in state.values() if x is not None)


def test_the_cure_cures() -> None:
    m = model()
    step = compiled(torch.optim.AdamW(m.parameters(), fused=True), "method", LEFT)
    gradients(m, 0)
    assert messages(step)
    torch.compiler.reset()
    opt = torch.optim.AdamW(m.parameters(), foreach=True)
    step = compiled(opt, "method")
    step()
    assert {row.format for row in fp8compile.last_compile().states if row.name == "exp_avg"} > {""}


def test_a_fused_step_does_not_hide_the_model() -> None:
    m = model()
    options = {**EAGER, "select": "all"}
    torch.compile(m, backend="fp8", options=options)(torch.randn(8, SIZE)).square().mean().backward()
    opt = torch.optim.AdamW(m.parameters(), fused=True)
    assert messages(compiled(opt, "method", LEFT))
    assert fp8compile.last_compile().matmuls


def test_schedulers_wrap_an_uncompiled_step() -> None:
    m = model()
    opt = torch.optim.AdamW(m.parameters(), fused=True)
    compiled(opt, "bound", LEFT)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
    gradients(m, 0)
    (message,) = messages(lambda: [(opt.step(), schedule.step()) for _ in range(3)])
    assert "fused=True" in message


def test_explain_of_a_fused_step_says_it() -> None:
    m = model()
    opt = torch.optim.AdamW(m.parameters(), fused=True)
    told = fp8compile.explain(opt.step, options={"states": "float32"})
    assert "foreach=True or fused=False" in told.failure
    assert not told.states
    gradients(m, 0)
    assert "foreach=True or fused=False" in fp8compile.explain(opt.step, options={"states": "float32"}).failure


def test_lbfgs_is_said() -> None:
    m, rounds = model(), []
    opt = torch.optim.LBFGS(m.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        rounds.append(1)
        opt.zero_grad()
        loss = m(torch.ones(4, SIZE)).square().mean()
        loss.backward()
        return loss

    step = torch.compile(opt.step, **FP8)
    (message,) = messages(lambda: [step(closure) for _ in range(2)])
    assert "nothing of LBFGS.step was compiled" in message
    assert "leave it uncompiled" in message
    assert len(rounds) >= 2


@pytest.mark.parametrize(("foreach", "how"), [(False, "method"), (True, "bound")])
def test_torchs_adafactor_is_compiled(foreach: bool, how: str) -> None:
    """It reads the number of steps from a tensor."""
    mine = model()
    theirs = copy.deepcopy(mine)
    settings: Any = {"lr": 1e-2, "foreach": foreach, "eps": (1e-7, 1e-3)}  # torch 2.11 cannot trace its default eps
    opt, other = (torch.optim.Adafactor(m.parameters(), **settings) for m in (mine, theirs))
    step = compiled(opt, how)
    for i in range(4):
        for m in (mine, theirs):
            gradients(m, i)
        step()
        other.step()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert 1 <= len(fp8compile.compiles()) <= 2
    assert fp8compile.last_compile().states
    assert not torch._dynamo.config.capture_scalar_outputs


def test_a_step_that_reads_numbers_is_compiled() -> None:
    mine = model()
    theirs = copy.deepcopy(mine)
    opt, other = ProdigyLike(mine.parameters()), ProdigyLike(theirs.parameters())
    step = compiled(opt, "method", PLAIN)
    for i in range(4):
        for m in (mine, theirs):
            gradients(m, i)
        step()
        other.step()
        assert opt.param_groups[0]["d"] == pytest.approx(other.param_groups[0]["d"])
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert isinstance(opt.param_groups[0]["d"], float)
    assert 1 <= len(fp8compile.compiles()) <= 3
    assert fp8compile.last_compile().states


def test_its_states_are_in_8_bits() -> None:
    m = model()
    opt = ProdigyLike(m.parameters())
    step = compiled(opt, "method")
    for i in range(3):
        gradients(m, i)
        step()
    weight = next(m.parameters())
    assert isinstance(opt.state[weight]["exp_avg"], fp8compile.FP8State)


def test_transformers_adafactor_is_compiled() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    m = model()
    step = compiled(optimization.Adafactor(m.parameters()), "method")
    for i in range(4):
        gradients(m, i)
        step()
    assert fp8compile.compiles()
    assert not fp8compile.last_compile().failure


def test_a_step_without_gradients_is_not_judged() -> None:
    m = model()
    opt = torch.optim.AdamW(m.parameters(), foreach=True)
    step = compiled(opt, "method")
    step()
    gradients(m, 0)
    step()
    assert fp8compile.last_compile().states


def test_numbers_are_read_in_steps_alone() -> None:
    """A model's own `.item()` is what torch makes of it."""
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._dynamo.config.capture_scalar_outputs)
        return x * 2

    torch.compile(torch._dynamo.disable(function), **FP8)(torch.ones(3))
    torch.compile(lambda x: torch._dynamo.disable(function)(x) + 1, **FP8)(torch.ones(3))
    assert seen == [False, False]
