"""`fused=True` is an implementation's name: compiled steps keep 8-bit states all the same, and compute the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import EAGER, SHAPES, make_parameters, set_gradients
from torch import nn

import fp8compile
from fp8compile.errors import Fp8Warning, OptionError

MIXED = SHAPES[1:3]  # a large one and a small one: tracing, parameter by parameter, takes most of the time
MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p, **more: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, **more),
    "AdamW": lambda p, **more: torch.optim.AdamW(p, **more),
    "Adagrad": lambda p, **more: torch.optim.Adagrad(p, lr_decay=0.1, **more),
    "SGD": lambda p, **more: torch.optim.SGD(p, momentum=0.9, nesterov=True, **more),
}


def compiled(opt: torch.optim.Optimizer, **options: Any) -> Callable[..., Any]:
    return torch.compile(opt.step, backend="fp8", options={**EAGER, **options})


def formats(opt: torch.optim.Optimizer) -> set[str]:
    """Formats of the states of large parameters."""
    states = [x for p, state in opt.state.items() if p.numel() > 4096 for x in state.values() if x.dim()]
    return {x.format if isinstance(x, fp8compile.FP8State) else str(x.dtype) for x in states}


def pair(name: str, **more: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return tuple(MAKES[name](make_parameters(MIXED), lr=0.01, fused=fused, **more) for fused in (True, False))


def advance(opt: torch.optim.Optimizer, step: Callable[[], Any], first: int, last: int) -> None:
    for i in range(first, last):
        set_gradients([p for group in opt.param_groups for p in group["params"]], i)
        step()


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer, near: float = 0.0) -> None:
    for x, y in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=near)


@pytest.mark.parametrize(
    ("name", "prepared"), [("Adam", True), ("AdamW", False), ("Adagrad", True), ("SGD", False), ("SGD", True)]
)
def test_as_without_the_flag(name: str, prepared: bool) -> None:
    mine, theirs = pair(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        for opt in (mine, theirs):
            if prepared:
                fp8compile.prepare_optimizer(opt)
            advance(opt, compiled(opt), 0, 3)
    assert formats(mine) == formats(theirs)
    assert "torch.float32" not in formats(mine)
    assert_same(mine, theirs)


def test_in_a_graph_of_all_parameters(tmp_path: Path) -> None:
    mine, theirs = pair("AdamW")
    for opt in (mine, theirs):
        advance(opt, compiled(opt, dump=str(tmp_path)), 0, 2)
    assert "torch.float32" not in formats(mine)
    assert_same(mine, theirs)


def test_after_steps_of_torchs_own_kernel() -> None:
    """Plain states, and counts, that the kernel has left are taken up."""
    mine, theirs = pair("AdamW")
    for opt in (mine, theirs):
        advance(opt, opt.step, 0, 2)
        advance(opt, compiled(opt), 2, 4)
    assert "torch.float32" not in formats(mine)
    assert_same(mine, theirs, near=1e-4)  # torch's kernel rounds otherwise, and a code may differ by one


def test_a_plain_checkpoint_is_of_a_fused_optimizer() -> None:
    mine, _ = pair("AdamW")
    advance(mine, compiled(mine), 0, 2)
    saved = copy.deepcopy(fp8compile.plain_state_dict(mine))
    assert saved["param_groups"][0]["fused"] is True
    other, _ = pair("AdamW")
    other.load_state_dict(saved)
    advance(other, other.step, 2, 3)
    assert formats(other) == {"torch.float32"}
    assert other.param_groups[0]["fused"] is True


def test_groups_that_are_added_later() -> None:
    mine, _ = pair("AdamW")
    advance(mine, compiled(mine), 0, 1)
    mine.add_param_group({"params": [nn.Parameter(torch.randn(96, 64))]})
    advance(mine, compiled(mine), 1, 2)
    assert "torch.float32" not in formats(mine)
    assert not any(group["fused"] for group in mine.param_groups)


@pytest.mark.parametrize("prepared", [None, False, True], ids=["", "prepared", "unscaling"])
def test_loss_scales(prepared: bool | None) -> None:
    """SGD tells scaled gradients from others. The first step is one that GradScaler has left to a fused optimizer."""
    mine, theirs = pair("Adam" if prepared else "SGD")  # SGD makes its momentum while it steps
    runs = []
    for opt in (mine, theirs):
        if prepared is not None:
            fp8compile.prepare_optimizer(opt, unscale=prepared)
        opt.step = compiled(opt)  # type: ignore[method-assign]
        runs.append((opt, torch.amp.GradScaler("cpu", init_scale=256.0)))
    for i in range(5):
        for opt, scaler in runs:
            parameters = opt.param_groups[0]["params"]
            set_gradients(parameters, i)
            scaler.scale(torch.zeros(()))
            for p in parameters:
                p.grad = p.grad * scaler.get_scale()
            if i == 3:
                parameters[0].grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        assert_same(mine, theirs, near=2e-4)
        assert runs[0][1].get_scale() == runs[1][1].get_scale() == (256.0 if i < 3 else 128.0)
    assert "torch.float32" not in formats(mine)


def test_states_that_stay_plain_are_left_to_torchs_kernel() -> None:
    mine, _ = pair("AdamW")
    with pytest.warns(Fp8Warning, match="nothing of AdamW.step was compiled"):
        advance(mine, compiled(mine, states="float32"), 0, 1)
    assert mine.param_groups[0]["fused"] is True


class Scaled(torch.optim.AdamW):
    """A step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][1].grad.mul_(3)
        super().step()


def test_a_step_that_is_not_torchs_is_left() -> None:
    opt = Scaled(make_parameters(), fused=True)
    with pytest.raises(OptionError, match="without fused=True"):
        fp8compile.prepare_optimizer(opt)
    assert opt.param_groups[0]["fused"] is True


def test_explain_says_the_states_of_a_fused_optimizer_and_leaves_it() -> None:
    mine, theirs = pair("AdamW")
    told = [str(fp8compile.explain(opt.step)) for opt in (mine, theirs)]
    assert told[0] == told[1]
    assert "2 of 4 optimizer states in 8 bits" in told[0]
    assert mine.param_groups[0]["fused"] is True
    assert mine.defaults["fused"] is True
