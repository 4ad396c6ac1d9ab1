"""Unscaling in the compiled step, against `GradScaler.unscale_` and a compiled step that it skips: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, SHAPES, Lion, compiled, make_parameters, set_gradients
from pipelines import replace_pass
from torch import Tensor, nn

import fp8compile
from fp8compile.errors import OptionError, StateError
from fp8compile.optimizer import unscaling

ELSEWHERE = ("adam", "adamw", "rmsprop")  # by others of their kind, and by tests below
SUPPORTED = [name for name in OPTIMIZERS if name not in ("sgd", "nesterov", "plain_sgd", "lion", *ELSEWHERE)]
STATES = {"first": "log/stochastic", "second": "log/stochastic"}
MIXED = SHAPES[1:3]  # a large one and a small one: tracing, parameter by parameter, takes most of the time


class Run:
    """An optimizer whose compiled step is `opt.step`, and a scaler that grows at every second step."""

    def __init__(
        self,
        name: str = "adamw",
        fused: bool = True,
        states: Any = STATES,
        dtype: torch.dtype = torch.float32,
        shapes: Any = MIXED,
        **options: Any,
    ):
        make, arguments = OPTIMIZERS[name]
        self.parameters = make_parameters(shapes, dtype)
        self.opt = make(self.parameters, **arguments | options.pop("arguments", {}))
        fp8compile.prepare_optimizer(self.opt, states, unscale=fused)
        self.opt.step, self.compilations = compiled(self.opt, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14 * 3, growth_factor=1.7, growth_interval=2)

    def train(self, step: int, overflow: bool = False, clip: bool = False, only: list[int] | None = None) -> None:
        set_gradients(self.parameters, step, only)
        factor = self.scaler.scale(torch.ones(1))
        for p in self.parameters:
            if p.grad is not None:
                p.grad.mul_(factor.to(p.dtype))
        if overflow:
            self.parameters[0].grad[3, 5] = torch.inf  # type: ignore[index]
        if clip:
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()

    def everything(self) -> dict[str, Tensor]:
        """Parameters, and all parts of states."""
        found = {str(i): p.detach().clone() for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            for name, x in self.opt.state[p].items():
                parts = ("payload", "side", "counter", "low") if isinstance(x, fp8compile.FP8State) else ("data",)
                found |= {f"{i} {name} {q}": y.clone() for q in parts if (y := getattr(x, q)) is not None}
        return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def calls_of(run: Run) -> list[str]:
    """What GradScaler says to an optimizer, step by step: "told", or nothing."""
    calls: list[str] = []

    def look(opt: Any, *_: Any) -> None:
        calls.append("told" if getattr(opt, "found_inf", None) is not None else "")

    run.opt._optimizer_step_pre_hooks[-1] = torch.compiler.disable(look)  # before ours
    run.opt._optimizer_step_pre_hooks.move_to_end(-1, last=False)
    return calls


@pytest.mark.parametrize(
    ("name", "dtype"),  # each optimizer with one of them, and one with both
    [*zip(SUPPORTED, [torch.bfloat16, torch.float32] * 5, strict=False), ("amsgrad", torch.bfloat16)],
    ids=str,
)
def test_as_unscale_and_step(name, dtype):
    """Steps with growth, an overflow, clipping, missing gradients: parameters, states, counts, scale."""
    mine, theirs = Run(name, dtype=dtype), Run(name, fused=False, dtype=dtype)
    calls = calls_of(mine)
    kinds: list[dict[str, Any]] = [{}, {}, {"overflow": True}, {}, {"clip": True}, {"overflow": True, "clip": True}, {}]
    scales = []
    for i, kind in enumerate(kinds):
        before = mine.everything()
        for run in (mine, theirs):
            run.train(i, **kind)
        assert differing(mine.everything(), theirs.everything()) == [], i
        assert bool(differing(before, mine.everything())) is not ("overflow" in kind) if i else True
        assert mine.scaler.get_scale() == theirs.scaler.get_scale()
        scales.append(mine.scaler.get_scale())
    assert len(set(scales)) > 3
    assert calls == ["", *["told"] * 6], "the first step compiles, all others are told, also to skip"
    assert len(mine.compilations) == len(theirs.compilations) == 1


def test_another_graph():
    """Of fewer gradients, after one of all."""
    runs = Run(shapes=SHAPES[:3]), Run(fused=False, shapes=SHAPES[:3])
    for i, only in enumerate((None, None, [0, 2], [0, 2])):
        for run in runs:
            run.train(i, only=only)
    assert differing(*(run.everything() for run in runs)) == []
    assert [len(run.compilations) for run in runs] == [2, 2]


def test_an_optimizer_without_states():
    """Without unscaling its graph has no kernel of ours, and torch's fuses the product and the sum: an ULP of both."""
    mine, theirs = Run("plain_sgd"), Run("plain_sgd", fused=False)
    for i in range(5):
        before = mine.everything()
        for run in (mine, theirs):
            run.train(i, overflow=i == 2)
        assert bool(differing(before, mine.everything())) is not (i == 2)
    for p, q in zip(mine.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=5 * 2**-23, atol=5 * 2**-24)  # of sums of about one, a step each


@pytest.mark.parametrize(
    ("states", "foreach"),
    [
        ("float32", False),
        ("float32", True),
        ({"parameters": "split"}, True),
        ({"parameters": "stochastic"}, False),
    ],
    ids=str,
)
def test_forms_of_adamw(states, foreach):
    """With a rate that is a tensor foreach stays; BF16 parameters carry low bits or counters; exact states."""
    arguments = {"foreach": foreach, "lr": torch.tensor(1e-3), "capturable": True}
    runs = [Run(fused=fused, states=states, dtype=torch.bfloat16, arguments=arguments) for fused in (True, False)]
    for i in range(5):
        for run in runs:
            run.train(i, overflow=i == 3)
        assert differing(*(run.everything() for run in runs)) == [], i
    assert len(runs[0].compilations) == 1


def test_with_inductor():
    runs = [Run(fused=fused, executor="inductor") for fused in (True, False)]
    for i in range(4):
        before = runs[0].everything()
        for run in runs:
            run.train(i, overflow=i == 2)
        assert bool(differing(before, runs[0].everything())) is not (i == 2) if i else True
    assert differing(*(run.everything() for run in runs)) == []


def test_without_a_scaler_and_with_a_disabled_one():
    mine, theirs = Run(), Run(fused=False)
    mine.scaler = torch.amp.GradScaler("cpu", enabled=False)
    theirs.scaler = torch.amp.GradScaler("cpu", enabled=False)
    for i in range(3):
        mine.train(i)
        theirs.train(i)
    mine.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    theirs.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for run in (mine, theirs):
        run.train(3)
        run.scaler = torch.amp.GradScaler("cpu", enabled=False)
        run.train(4)  # nothing of the scale is left
        set_gradients(run.parameters, 5)
        run.opt.step()
    assert differing(mine.everything(), theirs.everything()) == []
    assert len(mine.compilations) == 1


def test_two_optimizers_share_a_scaler():
    """One of them overflows: the other steps, as with torch."""
    pairs = [(Run(fused=fused), Run("rmsprop", fused=fused)) for fused in (True, False)]
    for a, b in pairs:
        b.scaler = a.scaler
        for i in range(4):
            for run, overflows in ((a, i == 2), (b, False)):
                set_gradients(run.parameters, i)
                factor = a.scaler.scale(torch.ones(1))
                for p in run.parameters:
                    p.grad.mul_(factor)  # type: ignore[union-attr]
                if overflows:
                    run.parameters[0].grad[0, 0] = torch.nan  # type: ignore[index]
            before = a.everything(), b.everything()
            for run in (a, b):
                a.scaler.step(run.opt)
            a.scaler.update()
            if i == 2:
                assert not differing(before[0], a.everything())
                assert differing(before[1], b.everything())
    for mine, theirs in zip(*pairs, strict=True):
        assert differing(mine.everything(), theirs.everything()) == []


def test_schedulers_of_rates():
    """A scheduler wraps the step before it is compiled; rates change every step."""
    runs = []
    for fused in (True, False):
        parameters = make_parameters(MIXED)
        opt = torch.optim.AdamW(parameters, lr=torch.tensor(1e-2))
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
        run = Run(fused=fused)
        run.parameters, run.opt = parameters, fp8compile.prepare_optimizer(opt, STATES, unscale=fused)
        run.opt.step, run.compilations = compiled(run.opt)
        runs.append(run)
        for i in range(5):
            run.train(i, overflow=i == 3)
            schedule.step()
    assert differing(*(run.everything() for run in runs)) == []
    assert len(runs[0].compilations) == 1
    assert runs[0].opt._step_supports_amp_scaling


def test_a_failing_pass_still_skips(monkeypatch):
    def fail(c: object) -> None:
        raise RuntimeError("planted")

    replace_pass(monkeypatch, "merge_updates", fail)
    run = Run(strict=False)
    with pytest.warns(fp8compile.Fp8Warning, match="planted"):
        run.train(0)
    before = run.everything()
    run.train(1, overflow=True)
    assert differing(before, run.everything()) == []
    run.train(2)
    assert differing(before, run.everything())


def test_gradients_stay_as_they_came():
    run = Run()
    for i in range(2):
        run.train(i)
    given = run.scaler.get_scale()
    set_gradients(run.parameters, 1)
    wanted = [p.grad.clone() for p in run.parameters]  # type: ignore[union-attr]
    run.train(1)
    assert all(torch.equal(p.grad, g * given) for p, g in zip(run.parameters, wanted, strict=True))


def test_who_is_refused():
    with pytest.raises(OptionError, match="Lion may count its steps in Python"):
        fp8compile.prepare_optimizer(Lion(make_parameters()), unscale=True)
    with pytest.raises(OptionError, match="SGD with momentum"):
        fp8compile.prepare_optimizer(torch.optim.SGD(make_parameters(), momentum=0.9), unscale=True)
    run = Run(dtype=torch.float16)
    set_gradients(run.parameters, 0)
    with pytest.raises(Exception, match=r"gradients are torch\.float16, so unscale=True cannot be") as error:
        run.opt.step()
    assert isinstance(error.value, StateError) or "StateError" in str(error.value)


def test_an_optimizer_that_is_not_compiled_is_torchs_business():
    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(make_parameters(MIXED)), unscale=True)
    set_gradients(opt.param_groups[0]["params"], 0)
    opt.step()
    assert not opt._step_supports_amp_scaling
    assert not unscaling._unscaling[opt].numbers
