"""New states of one parameter, without the memory of a tensor of its size, and without a kernel that encodes it.

    with as_numbers(opt, parameter):  opt._init_group(…)       state["exp_avg"] = torch.zeros_like(parameter)
                                                              is one number, expanded to the parameter's shape
    fill(state)                                               makes tensors of those that nobody has converted

The zeros of an embedding of 590 M elements are 2.4 GB, from which 8-bit states of 0.6 GB would be made at once. Only
torch's own optimizers are helped so: what another one does with its new states, nobody knows.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fp8compile.optimizer.torch_methods import is_torchs
from fp8compile.torch_hooks.local_parts import local_part, set_local_part, sharded_like

LARGE = 4096  # elements, below which no state becomes one of 8 bits by default


def as_numbers(opt: Optimizer, parameter: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which states that `opt` makes for `parameter` may be expanded numbers (`is_one_number`)."""
    large = local_part(parameter).numel() >= LARGE
    return _Numbers(parameter) if large and is_torchs(opt, "_init_group") else contextlib.nullcontext()


class _Numbers(TorchFunctionMode):
    """Makes an expanded number of what is filled and has the parameter's shape."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.parameter = parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = _filled_with(func, args, kwargs)
        if value is None or not args or args[0] is not self.parameter:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or self.parameter.dtype
        local = local_part(self.parameter)
        number = torch.full((), value, dtype=dtype, device=local.device)
        return sharded_like(self.parameter, number.expand(local.shape))


def _filled_with(func: Any, args: Any, kwargs: dict[str, Any]) -> float | None:
    """Return the number with which a function of torch fills a tensor like its first argument; None if it does not."""
    if kwargs.keys() - {"dtype", "memory_format"}:
        return None
    if func is torch.zeros_like:
        return 0.0
    if func is torch.full_like and len(args) == 2 and isinstance(args[1], (int, float)):
        return args[1]
    return None


def is_one_number(x: Tensor) -> bool:
    """Return True if all elements of `x` are one in memory."""
    return x.numel() > 1 and not any(x.stride())


def number_of(x: Tensor) -> Tensor:
    """Return the number of which all elements of `x` are, as a tensor of no dimensions."""
    return x[(0,) * x.dim()]


def fill(states: dict[str, Any], parameter: Tensor) -> None:
    """Make tensors, laid out as the parameter, of the states that still are expanded numbers, in place of these."""
    for name, state in states.items():
        if isinstance(state, Tensor) and type(local := local_part(state)) is Tensor and is_one_number(local):
            if local.shape != local_part(parameter).shape:
                continue
            filled = _empty(local_part(parameter), local.dtype).fill_(number_of(local))
            if local is state:
                states[name] = filled
            else:
                set_local_part(state, filled)  # type: ignore[arg-type]


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a plain tensor laid out as `like`: `empty_like` of a weight that is gathered as FP8 is such a weight."""
    layout = torch.empty_strided(like.shape, like.stride(), device="meta", dtype=torch.float32)
    return torch.empty_like(layout, dtype=dtype, device=like.device)
