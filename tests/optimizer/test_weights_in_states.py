"""States that are weights, copies or averages of them, are not rounded to 8 bits; moments of gradients are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import compiled, formats, relative
from torch import Tensor, nn

import fp8compile
from fp8compile.optimizer import state_recipe
from fp8compile.optimizer.state_recipe import is_slow, is_weight

SHAPE, STEPS = (64, 128), 150


class Slow(torch.optim.Optimizer):
    """What makes and moves one state of weights beside a moment, as `kind` says."""

    def __init__(self, params: Any, kind: str, lr: float = 0.5):
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["weights"], s["moment"] = p.clone(), torch.zeros_like(p)
                s["moment"].lerp_(p.grad, 0.1)
                getattr(self, self.kind)(p, s["weights"], s["moment"], group["lr"])

    def lookahead(self, p: Tensor, slow: Tensor, moment: Tensor, lr: float) -> None:
        p.sub_(moment, alpha=lr)
        slow.lerp_(p, 0.01)
        p.copy_(slow)

    def averaged(self, p: Tensor, average: Tensor, moment: Tensor, lr: float) -> None:
        p.sub_(moment, alpha=0.1 * lr)
        average.lerp_(p, 0.01)

    def schedule_free(self, p: Tensor, z: Tensor, moment: Tensor, lr: float) -> None:
        """z is never computed from p: it goes its own small steps."""
        p.lerp_(z, 0.05)
        p.sub_(moment, alpha=0.005 * lr)
        z.sub_(p.grad, alpha=0.01 * lr)


KINDS = ("lookahead", "averaged", "schedule_free")


def start(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Slow, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter((torch.randn(SHAPE, generator=generator) * 0.1).to(dtype))
    return Slow([weight], kind), weight


def train(step: Any, weight: nn.Parameter, steps: int) -> None:
    target = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * 0.1
    for _ in range(steps):
        weight.grad = (2 * (weight.detach() - target)).to(weight.dtype)
        step()


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_plain_states(kind: str) -> None:
    """The moment, whose rounding would show as well, is kept exact here."""
    (mine, weight), (theirs, wanted) = start(kind), start(kind)
    step, count = compiled(mine, states={"formats": {"moment": "float32"}})
    train(step, weight, STEPS)
    train(theirs.step, wanted, STEPS)
    assert formats(mine, weight) == {"moment": "float32"}
    assert len(count) <= 2
    assert relative(mine.state[weight]["weights"], theirs.state[wanted]["weights"]) < 1e-5
    assert relative(weight, wanted) < 1e-5
    (row,) = [r for r in fp8compile.compiles()[-1].states if r.name == "weights"]
    assert "average of the weights" in row.reason


def test_asgd_keeps_its_average_which_begins_at_zero() -> None:
    weight = start("averaged")[1]
    opt = torch.optim.ASGD([weight], lr=0.01, t0=0, lambd=0.0)
    wanted = copy.deepcopy(weight)
    plain = torch.optim.ASGD([wanted], lr=0.01, t0=0, lambd=0.0)
    train(compiled(opt)[0], weight, 50)
    train(plain.step, wanted, 50)
    assert formats(opt, weight) == {}
    assert relative(opt.state[weight]["ax"], plain.state[wanted]["ax"]) < 1e-5


def test_a_format_given_by_name_is_used() -> None:
    opt, weight = start("averaged")
    fp8compile.prepare_optimizer(opt, {"formats": {"weights": "log/stochastic"}})
    train(compiled(opt)[0], weight, 3)
    assert formats(opt, weight) == {"weights": "log/stochastic", "moment": "log"}


@pytest.mark.parametrize(("plain", "first"), [(False, "optimizer"), (False, "weights"), (True, "weights")])
def test_a_checkpoint_keeps_them(plain: bool, first: str) -> None:
    """Where it has 8-bit states also if the optimizer is loaded before the weights that its states are near."""
    opt, weight = start("averaged")
    fp8compile.prepare_optimizer(opt)
    train(compiled(opt)[0], weight, 3)
    checkpoint = fp8compile.plain_state_dict(opt) if plain else copy.deepcopy(opt.state_dict())
    other, blank = start("averaged")
    with torch.no_grad():
        blank.copy_(weight if first == "weights" else torch.randn(SHAPE))
    fp8compile.prepare_optimizer(other)
    other.load_state_dict(checkpoint)
    assert formats(other, blank) == {"moment": "log"}
    assert torch.equal(other.state[blank]["weights"], opt.state[weight]["weights"])
    train(compiled(other)[0], blank, 2)
    assert formats(other, blank) == {"moment": "log"}


def test_moments_are_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(SHAPE)
    for state in (torch.zeros(SHAPE), torch.randn(SHAPE), 0.1 * weight, weight.square(), -weight, 3 * weight):
        assert not is_weight("state", weight, state)
    assert is_weight("state", weight, weight + 0.3 * torch.randn(SHAPE))
    assert is_weight("state", weight.bfloat16(), weight)
    monkeypatch.setattr(state_recipe, "SAMPLE", 100)
    assert is_weight("state", weight, weight.clone())
    assert is_weight("state", weight.T, weight.T.contiguous())
    assert not is_weight("state", weight, torch.randn(SHAPE))
    assert not is_weight("state", torch.zeros(SHAPE), torch.zeros(SHAPE))
    assert not is_weight("state", torch.empty(0, 4), torch.empty(0, 4))
    assert not is_weight("state", weight.to("meta"), weight.to("meta"))


def test_a_spike_is_forgotten() -> None:
    """Rounded to nearest, a state that falls by 0.1 % a step would not fall at all."""
    assert is_slow("exp_inf")
    weight = nn.Parameter(torch.zeros(SHAPE))
    opt = torch.optim.Adamax([weight], lr=1e-3)
    step = compiled(opt)[0]
    generator = torch.Generator().manual_seed(3)
    for i in range(400):
        weight.grad = torch.randn(SHAPE, generator=generator) * (1.0 if i == 0 else 1e-3)
        step()
    generator = torch.Generator().manual_seed(3)
    spike = torch.randn(SHAPE, generator=generator).abs()
    found = opt.state[weight]["exp_inf"].dequantize(torch.float32)
    large = spike > 0.5
    assert float((found / (spike * 0.999**399))[large].mean()) == pytest.approx(1.0, abs=0.03)
