"""Stand-ins: an optimizer of two small parameters of one kind, whose step is traced in place of the real one.

Their states have the formats of the real ones and other shapes, one with one dimension and one with two: a rule that
depends on either is not the same for both, and no rule for all.
"""

from __future__ import annotations

import collections
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8compile.optimizer.shared_step.kinds import numbers_of
from fp8compile.optimizer.state_parts import INNER
from fp8compile.optimizer.states import FP8State
from fp8compile.state_formats import parse_state_format
from fp8compile.torch_hooks.local_parts import local_part

SHAPES = ((3, 4), (5,))


def stand_in(opt: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Optimizer:
    """Return an optimizer like `opt`, of one group like `group`, of parameters like `parameter`, without hooks."""
    new = object.__new__(type(opt))
    kept = {k: v for k, v in vars(opt).items() if not callable(v) and "hook" not in k}
    hooks = {k: type(v)() for k, v in vars(opt).items() if "hook" in k and isinstance(v, dict)}
    parameters = [_parameter_like(parameter, shape) for shape in SHAPES]
    states, numbers = collections.defaultdict(dict), numbers_of(opt, parameter)
    for p in parameters:
        own = {name: _state_like(x, name in numbers, p) for name, x in opt.state.get(parameter, {}).items()}
        if parameter in opt.state:
            states[p] = own
    new.__dict__.update({**kept, **hooks, "state": states, "param_groups": [{**group, "params": parameters}]})
    return new


def fresh_step(opt: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the step of the class of `opt` as a function with code of its own.

    Dynamo keeps what it compiles by code, and gives up on code that it has compiled often: not on the user's.
    """
    step = inspect.unwrap(type(opt).step)
    code = step.__code__.replace(co_name="step_of_stand_ins")
    return types.FunctionType(code, step.__globals__, "step_of_stand_ins", step.__defaults__, step.__closure__)


def _parameter_like(x: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=x.dtype, device=local_part(x).device))
    assert x.grad is not None
    made.grad = torch.zeros(shape, dtype=x.grad.dtype, device=made.device)
    return made


def _state_like(state: Any, is_number: bool, made: Tensor) -> Any:
    """Return a state of `made` as `state` is one of another parameter."""
    if not isinstance(state, Tensor):
        return state
    if is_number:
        return torch.zeros_like(state)
    local = local_part(state)
    if not isinstance(local, FP8State):
        return torch.zeros(made.shape, dtype=local.dtype, device=made.device)
    shapes = {"side": parse_state_format(local.format).side_shape(made.numel()), "counter": [1]}
    kept = {name: x for name in INNER if (x := getattr(local, name)) is not None}
    inner = {
        name: torch.zeros(shapes.get(name, made.shape), dtype=x.dtype, device=x.device) for name, x in kept.items()
    }
    return FP8State(*(inner.get(name) for name in INNER), local.format, local.parameter, local.dtype)  # type: ignore[arg-type]
