"""The plan of an optimizer that nobody has compiled: its groups, its states in 8 bits, and what updates them.

A twin with parameters of the same shapes and no data (device "meta") is compiled aside; nothing of the optimizer is
read but its settings.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fp8compile.errors import Fp8Error
from fp8compile.insight.isolation import backend_aside, function_aside, recompiling
from fp8compile.optimizer import fused
from fp8compile.optimizer.parameter_groups import group_rows
from fp8compile.optimizer.prepare import prepare_optimizer
from fp8compile.optimizer.state_conversion import is_prepared, recipe_of, state_rows
from fp8compile.options import Options
from fp8compile.plan import store
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Lowered, MergedUpdate
from fp8compile.torch_hooks.calls import uncompiled_calls
from fp8compile.torch_hooks.failures import first_line

HALF = "inference"  # a step has no backward
PLAIN = "not merged: no state is in 8 bits, so the step is compiled as it would be without FP8"


def optimizer_of(target: Any) -> Optimizer | None:
    """Return the optimizer whose `step` this is, compiled or not."""
    owner = getattr(target, "__self__", None)
    return owner if isinstance(owner, Optimizer) else None


def optimizer_plan(opt: Optimizer, options: Mapping[str, Any]) -> Plan:
    """Return what `torch.compile(opt.step, backend="fp8", options=options)` makes of `opt`: states, groups, updates.

    Before its first step: of the states that it will have. Updates are those of parameters that require gradients, all
    on one device. Of a fused step that is left to torch nothing is compiled, as `failure` says. Raises `Fp8Error` where
    only a real step can tell the states; where it can tell no update, its row says so.
    """
    recipe = recipe_of(opt) if is_prepared(opt) else Options.parse(options).states
    if fused.is_fused(opt) and not fused.can_be_taken_over(opt, recipe):
        return uncompiled_calls.plan(f"{type(opt).__name__}.step", opt, ())
    _refuse_arguments(opt)
    known = any(opt.state.get(p) for group in opt.param_groups for p in group["params"])
    twin = _without_data(opt)
    fused.take_over(twin)
    try:
        _step_of(twin)()
    except Exception as error:
        if not known:
            raise Fp8Error(
                f"explain: the states of {type(opt).__name__} are not known before its first step (a step without data "
                f"failed: {first_line(error)}); make one, then explain"
            ) from error
        updates = [_unknown(opt, error)]
    else:
        prepare_optimizer(twin, recipe)
        updates = _updates(twin, options)
    states = state_rows(opt if known else twin, recipe)
    return Plan("optimizer", states=states, groups=group_rows(opt, states), halves={HALF: Lowered(updates=updates)})


def _refuse_arguments(opt: Optimizer) -> None:
    """Raise `Fp8Error` for an optimizer whose step cannot be made without being given something."""
    step = f"{type(opt).__name__}.step"
    parameters = list(inspect.signature(type(opt).step).parameters.values())[1:]  # of a function, whose first is `self`
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed == ["closure"]:
        raise Fp8Error(
            f"explain: {step} needs a closure: it runs the model and its backward pass within the step, as often as it "
            "wants to, so the step is not one graph and its states are not kept in 8 bits. Call opt.step(closure) "
            "uncompiled, and compile the model that the closure calls"
        )
    if needed:
        raise Fp8Error(
            f"explain: {step} needs {', '.join(map(repr, needed))}, and explain has nothing to give it. Make a "
            "compiled step, and read fp8compile.last_compile()"
        )


def _updates(twin: Optimizer, options: Mapping[str, Any]) -> list[MergedUpdate]:
    """Return what becomes of the updates of `twin`, an optimizer without data that has made a step: it is compiled."""
    chosen = {**options, "executor": "eager", "adaptive": None}
    with store.collected() as found, recompiling():
        try:
            torch.compile(function_aside(_step_of(twin)), backend=backend_aside(), options=chosen)()
        except Exception as error:
            return [_unknown(twin, error)]
    if updates := [update for plan in found for update in plan.updates]:
        return updates
    if untraced := [plan.failure for plan in found if plan.failure]:
        return [_row(twin, f"not merged: {untraced[0]}")]
    failures = [half.failure for plan in found for half in plan.halves.values() if half.failure]
    return [_row(twin, f"not merged: a pass failed: {failures[0]}" if failures else PLAIN)]


def _unknown(opt: Optimizer, error: Exception) -> MergedUpdate:
    return _row(opt, f"not known before it is compiled: a step without data failed: {first_line(error)}")


def _row(opt: Optimizer, reason: str) -> MergedUpdate:
    """Return one row for all parameters of `opt`."""
    trained = [p for group in opt.param_groups for p in group["params"] if p.requires_grad]
    return MergedUpdate(len(trained), sum(p.numel() for p in trained), (), 0, reason)


def _step_of(opt: Optimizer) -> Callable[[], Any]:
    """Return the step of its class: a scheduler of learning rates puts a function of its own in its place."""
    return types.MethodType(type(opt).step, opt)


def _without_data(opt: Optimizer) -> Optimizer:
    """Return a copy of `opt` before its first step, whose parameters have shapes and no data; hooks are left out."""
    twin = copy.copy(opt)
    own = {name: value for name, value in vars(opt).items() if name not in ("step", "_init_group")}
    vars(twin).update({name: value for name, value in own.items() if name not in vars(twin)})
    twin.state, twin.defaults = defaultdict(dict), dict(opt.defaults)
    twin.param_groups = [
        {
            **{name: _on_the_cpu(value) for name, value in group.items()},
            "params": [_shape_of(p) for p in group["params"]],
        }
        for group in opt.param_groups
    ]
    return twin


def _on_the_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value  # a learning rate


def _shape_of(parameter: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    twin.grad = torch.empty_like(twin) if parameter.requires_grad else None  # a frozen one has no states
    return twin
