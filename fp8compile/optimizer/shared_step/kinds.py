"""Kinds: what the update of a parameter may depend on. Parameters of one kind are updated by one rule.

    kind = the optimizer's class · settings of the group · dtypes, device, layout · formats of the states

torch's own optimizers look at nothing else: their steps treat all parameters of a group in one way, but for these. What
another optimizer looks at (a name, a shape, a place in the list), nobody can know, so it is none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8compile.optimizer.shared_step.roles import NotAlikeError, SparseGradientError
from fp8compile.optimizer.states import FP8State
from fp8compile.optimizer.torch_methods import is_torchs
from fp8compile.torch_hooks.local_parts import local_part

NUMBERS = ("lr", "weight_decay")  # settings that are taken for numbers which change, unless they are 0
UNREAD = ("params", "param_names", "foreach_given")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kind:
    """Facts in the form of texts and types, equal for parameters that one rule updates."""

    optimizer: type
    settings: tuple[tuple[str, Any], ...]
    parameter: tuple[Any, ...]
    gradient: torch.dtype
    states: tuple[tuple[str, Any], ...]
    is_unscaled: bool

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of the settings that are numbers which may change."""
        return tuple(name for name, value in self.settings if value is Number)


class Number:
    """Stands for any float, also where somebody has written it as an integer."""


def refusal_of(opt: Optimizer) -> str:
    """Return the reason why steps of `opt` cannot be taken to treat parameters alike; "" if they can."""
    for name in ("step", "_init_group"):
        if not is_torchs(opt, name):
            return f"{type(opt).__name__}.{name} is not torch's own: it may treat each parameter in another way"
    if any(group.get("fused") for group in opt.param_groups):
        return "fused=True runs torch's own kernel"
    if any(group.get("differentiable") for group in opt.param_groups):
        return "a differentiable step is part of a graph"
    return ""


def kind_of(opt: Optimizer, group: Mapping[str, Any], parameter: Tensor, moving: set[str], is_unscaled: bool) -> Kind:
    """Return the kind of a parameter that has a gradient and states; raises `NotAlikeError` for one without any.

    moving: names of settings that are known to change.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise SparseGradientError("a gradient is sparse, which torch.compile does not support")
    if parameter.dtype not in FLOATS:
        raise NotAlikeError(f"a parameter is {parameter.dtype}")
    numbers = numbers_of(opt, parameter)
    states = tuple((n, _state(n, parameter, value, n in numbers)) for n, value in opt.state.get(parameter, {}).items())
    local = local_part(parameter)
    how = local.dtype, local.device, local.is_contiguous(), _placements(parameter)
    if _placements(gradient) != how[-1] or type(local_part(gradient)) is not Tensor:
        raise NotAlikeError("a gradient is another kind of tensor than its parameter")
    settings = tuple((name, _setting(name, group[name], moving)) for name in opt.defaults if name in group)
    return Kind(type(opt), settings, how, gradient.dtype, states, is_unscaled)


def _setting(name: str, value: Any, moving: set[str]) -> Any:
    is_number = type(value) in (int, float)
    if name == "lr" and is_number:
        return Number
    if name in moving or (name in NUMBERS and is_number and value):
        return Number
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.device, value.shape
    if isinstance(value, tuple):
        return tuple(_setting("", x, set()) for x in value)
    if not isinstance(value, (int, float, bool, str, type(None))):
        raise NotAlikeError(f"the setting {name} is a {type(value).__name__}")
    return type(value), value


def numbers_of(opt: Optimizer, parameter: Tensor) -> set[str]:
    """Return the names of the states of a parameter that are one number, whatever the shape of the parameter.

    Of a parameter that is a single number itself its shape does not tell; other parameters of the optimizer do. Raises
    `NotAlikeError` where none does.
    """
    states = opt.state.get(parameter, {})
    if parameter.dim():
        return {name for name, x in states.items() if isinstance(x, Tensor) and x.shape != parameter.shape}
    missing, found = set(states), set[str]()
    for other in opt.state:
        if not missing:
            break
        if other.dim() and (told := missing & opt.state[other].keys()):
            missing, found = missing - told, found | told & numbers_of(opt, other)
    if missing:
        raise NotAlikeError(f"a parameter is a single number, and no other one tells what its {min(missing)!r} is")
    return found


def _state(name: str, parameter: Tensor, value: Any, is_number: bool) -> Any:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise NotAlikeError(f"the state {name!r} is a {type(value).__name__}")
    local = local_part(value)
    if is_number:
        if value.dim() or isinstance(value, DTensor):
            raise NotAlikeError(f"the state {name!r} has neither the shape of its parameter nor none")
        return "number", value.dtype, value.device
    if _placements(value) != _placements(parameter):
        raise NotAlikeError(f"the state {name!r} is not sharded as its parameter is")
    if isinstance(local, FP8State):
        return "state", local.format, local.parameter, local.dtype, local.counter is None, local.low is None
    if type(local) is not Tensor:
        raise NotAlikeError(f"the state {name!r} is a {type(local).__name__}")
    return "tensor", local.dtype


def _placements(x: Tensor) -> Any:
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else None
