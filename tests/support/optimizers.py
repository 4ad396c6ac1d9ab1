"""Optimizers, parameters and gradients that tests of optimizers share, and a reference for 8-bit states.

`Simulated` is the independent reference: torch's own optimizer, eager, in FP32; after each step every state that
fp8compile would keep in 8 bits is replaced by what `kernels/reference/state_reference.py` makes of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.backend import fp8
from fp8compile.kernels.reference import state_reference
from fp8compile.optimizer.state_recipe import StateRecipe, salt
from fp8compile.state_formats import parse_state_format

EAGER = {"executor": "eager", "strict": True}


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675) as a user would write it: no `_init_group`, states made while stepping."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                update = m * beta1 + p.grad * (1 - beta1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(update), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adam_decayed": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {"t0": 2}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop_centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "plain_sgd": (torch.optim.SGD, {}),
    "lion": (Lion, {"weight_decay": 0.1}),
}
SHAPES = ((96, 64), (64, 65), (7,), (1,))  # two in 8 bits, of which one ends inside a group; two that are small


def make_parameters(shapes: Sequence[Any] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: Sequence[Tensor], step: int, only: Sequence[int] | None = None) -> None:
    """The same gradients for the same step, in each parameter's dtype (values that BF16 has)."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(parameters):
        gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.device)
        p.grad = gradient.to(p.dtype) if only is None or i in only else None


def step_both(
    i: int,
    step: Callable[[], Any],
    mine: Sequence[Tensor],
    reference: Callable[[], Any],
    theirs: Sequence[Tensor],
    only: Sequence[int] | None = None,
) -> None:
    """Step `i` of an optimizer and of its reference, with equal gradients."""
    set_gradients(mine, i, only)
    set_gradients(theirs, i, only)
    step()
    reference()


def relative(a: Tensor, b: Tensor) -> float:
    """How far `a` is from `b`, as a share of `b`."""
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def assert_near(mine: Sequence[Tensor], theirs: Sequence[Tensor], bound: float) -> None:
    for p, q in zip(mine, theirs, strict=True):
        assert relative(p, q) < bound


def compiled(opt: torch.optim.Optimizer, **options: Any) -> tuple[Callable[[], Any], list[int]]:
    """The compiled step, and a list that grows with every compilation."""
    count: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        result = fp8(gm, inputs, options={**EAGER, **options})
        count.append(len(inputs))
        return result

    return torch.compile(opt.step, backend=backend), count


def formats(opt: torch.optim.Optimizer, parameter: Tensor) -> dict[str, str]:
    """Formats of the 8-bit states of a parameter, by name."""
    states = opt.state[parameter].items()
    return {name: x.format for name, x in states if isinstance(x, fp8compile.FP8State)}


class Simulated:
    """Torch's optimizer in FP32, whose states are stored and read back after each step."""

    def __init__(self, opt: torch.optim.Optimizer, recipe: StateRecipe):
        self.opt, self.recipe, self.writes = opt, recipe, {}

    def step(self) -> None:
        self.opt.step()
        parameters = [p for group in self.opt.param_groups for p in group["params"]]
        for index, p in enumerate(parameters):
            for name, x in self.opt.state[p].items() if p.grad is not None else ():
                if isinstance(x, Tensor):
                    self.opt.state[p][name] = self._stored(index, name, p, x)

    def _stored(self, index: int, name: str, parameter: Tensor, x: Tensor) -> Tensor:
        how = self.recipe.decide(name, parameter, x).format
        if how is None or name == "ax":  # ASGD's average of weights
            return x
        key = index, name
        self.writes[key] = self.writes.get(key, -1) + 1
        counter = torch.tensor([salt(index, name) + self.writes[key]], dtype=torch.int32)
        return state_reference.decode(*state_reference.encode(x, how, counter), parse_state_format(how))


def twins(
    make: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], shapes: Sequence[Any] = SHAPES
) -> tuple[torch.optim.Optimizer, list[nn.Parameter], torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer to compile and one for the reference, on equal parameters."""
    mine = make_parameters(shapes)
    theirs = copy.deepcopy(mine)
    arguments = {"lr": 0.01, **arguments}
    return (
        make(mine, **arguments),
        mine,
        make(theirs, **{k: v for k, v in arguments.items() if k != "capturable"}),
        theirs,
    )
