"""The plan of an optimizer that nobody has compiled: which of its states would be kept in 8 bits, and why."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fp8compile import optim
from fp8compile.errors import Fp8Error
from fp8compile.options import Options
from fp8compile.plan import Plan


def optimizer_of(target: Any) -> Optimizer | None:
    """The optimizer whose `step` this is, compiled or not."""
    owner = getattr(target, "__self__", None)
    return owner if isinstance(owner, Optimizer) else None


def optimizer_plan(opt: Optimizer, options: Mapping[str, Any]) -> Plan:
    """What `torch.compile(opt.step, backend="fp8", options=options)` makes of the states of `opt`.

    Before its first step: of those that it will have. Raises `Fp8Error` where only a real step can tell.
    """
    optim.refuse_fused(opt)
    parameters = [p for group in opt.param_groups for p in group["params"]]
    known = any(opt.state.get(p) for p in parameters)
    return Plan(
        "optimizer", states=optim.state_rows(opt if known else _after_a_step(opt), Options.parse(options).states)
    )


def _after_a_step(opt: Optimizer) -> Optimizer:
    """A copy of `opt` that has made a step with parameters of the same shapes, and no data."""
    twin = copy.copy(opt)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [_without_data(p) for p in group["params"]]} for group in opt.param_groups]
    try:
        type(opt).step(twin)
    except Exception as error:
        raise Fp8Error(
            f"explain: the states of {type(opt).__name__} are not known before its first step (a step without data "
            f"failed: {type(error).__name__}: {error}); make one, then explain"
        ) from error
    return twin


def _without_data(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    twin.grad = torch.empty_like(twin) if parameter.requires_grad else None  # a frozen one has no states
    return twin
