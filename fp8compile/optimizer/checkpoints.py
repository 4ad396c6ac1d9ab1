"""Checkpoints of optimizers with 8-bit states.

`state_dict()` holds `FP8State`s, which torch.save and torch.distributed.checkpoint keep; `plain_state_dict(opt)` holds
plain tensors for everybody else. `load_state_dict` takes either, and checks all of it before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile.errors import StateError
from fp8compile.optimizer.state_conversion import Record, decide, is_fp8, parameters_of, recipe_of, record_of
from fp8compile.optimizer.state_recipe import StateRecipe, salt
from fp8compile.optimizer.states import FP8State
from fp8compile.state_formats import StateFormat
from fp8compile.torch_hooks.calls.untraced import never_compiled
from fp8compile.torch_hooks.local_parts import local_part, sharded_like


def plain_state_dict(opt: Optimizer, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return `opt.state_dict()` with plain tensors of `dtype` instead of 8-bit states: a checkpoint for any optimizer.

    All tensors are copies, those of plain states too: they stay as they are while `opt` goes on. The missing bits of
    split parameters are not in it: they are the parameter's, in FP8 checkpoints only.
    """
    whole, given = opt.state_dict(), record_of(opt)
    groups = [_as_made(group, index, given) for index, group in enumerate(whole["param_groups"])]
    states = {
        key: {name: _copied(_plain(value, dtype), value) for name, value in state.items()}
        for key, state in whole["state"].items()
    }
    return {**whole, "state": states, "param_groups": groups}


def _copied(plain: Any, value: Any) -> Any:
    return value.clone() if plain is value and isinstance(value, Tensor) else plain


def _as_made(group: dict[str, Any], index: int, given: Record) -> dict[str, Any]:
    """Return the settings of a group as the optimizer was made with them."""
    made = dict(group)
    if index in given.foreach and group["foreach"] is False:
        made["foreach"] = given.foreach[index]
    if index in given.fused and not group["fused"]:
        made["fused"] = given.fused[index]
    return made


def _plain(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not is_fp8(value):
        return value
    return sharded_like(value, local_part(value).dequantize(dtype))


@never_compiled
def before_loading(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with states as the recipe of `opt` wants them.

    Everything is checked first: nothing of `opt` has been touched when this raises `StateError`.
    """
    recipe, mine = recipe_of(opt), parameters_of(opt)
    loaded = state_dict.get("state")
    saved = [key for group in state_dict.get("param_groups", []) for key in group["params"]]
    if not isinstance(loaded, Mapping) or len(saved) != len(mine):
        raise StateError(f"the checkpoint has {len(saved)} parameters, this optimizer {len(mine)}")
    parameters = dict(zip(saved, enumerate(mine), strict=True))
    for key, state in loaded.items():
        if key not in parameters:
            raise StateError(f"the checkpoint has states of a parameter {key!r} that is in none of its groups")
        for name, value in state.items():
            _check(key, name, value, parameters[key][1], opt)
    record_of(opt).weights.update(_left_plain(loaded))
    states = {key: _adopted(opt, *parameters[key], state, recipe) for key, state in loaded.items()}
    return {**state_dict, "state": states}


def _check(key: Any, name: str, value: Any, parameter: Tensor, opt: Optimizer) -> None:
    if not isinstance(value, Tensor) or (not is_fp8(value) and value.numel() == 1):
        return
    if value.shape != parameter.shape and (is_fp8(value) or not _may_have_its_shape(name, value, parameter, opt)):
        raise StateError(
            f"state {name!r} of parameter {key} has shape {list(value.shape)}, the parameter {list(parameter.shape)}: "
            "the checkpoint is of another model"
        )
    local = local_part(value)
    if isinstance(local, FP8State):
        local.check()


def _may_have_its_shape(name: str, value: Tensor, parameter: Tensor, opt: Optimizer) -> bool:
    """Return True if a plain state may belong to a parameter of another shape: a factor of it, or flat ones.

    So it is for Adafactor and LBFGS. A state of as many dimensions with other sizes is of another model, unless this
    optimizer has one like it.
    """
    if value.dim() != parameter.dim():
        return True
    mine = opt.state.get(parameter, {}).get(name)
    sizes = zip(value.shape, parameter.shape, strict=True)
    return all(a in (1, b) for a, b in sizes) or (isinstance(mine, Tensor) and mine.shape == value.shape)


def _left_plain(states: Mapping[Any, Mapping[str, Any]]) -> set[str]:
    """Return names of states that a checkpoint with 8-bit states has as plain tensors only: they were not to be
    rounded."""
    tensors = [(name, x) for state in states.values() for name, x in state.items() if isinstance(x, Tensor) and x.dim()]
    packed = {name for name, x in tensors if is_fp8(x)}
    return {name for name, _ in tensors} - packed if packed else set()


def _adopted(
    opt: Optimizer, index: int, parameter: Tensor, state: Mapping[str, Any], recipe: StateRecipe
) -> dict[str, Any]:
    """Return copies of the loaded states of one parameter as `recipe` wants them, 8-bit ones bit for bit where it can
    be."""
    rounding, adopted = recipe.rounding(parameter), {}
    for name, value in state.items():
        adopted[name] = value
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        value = value.to(parameter.device).clone()
        format = decide(opt, recipe, name, parameter, value).format
        if format is None:
            adopted[name] = _plain(value, parameter.dtype)
        else:
            local = _in_format(local_part(value), rounding, format, salt(index, name), parameter.dtype)
            adopted[name] = sharded_like(value, local)
            rounding = "nearest"
    return adopted


def _in_format(x: Tensor, rounding: str, format: StateFormat, salt: int, dtype: torch.dtype) -> FP8State:
    """Return `x` (plain, or stored in any format) as an `FP8State` that keeps of it what it can."""
    name = str(format)
    if not isinstance(x, FP8State):
        return FP8State.of(x.contiguous(), rounding, format=name, salt=salt, dtype=dtype)
    fresh = FP8State.of(x.dequantize(torch.float32), rounding, format=name, salt=salt, dtype=dtype)
    if x.format == name:
        fresh.payload, fresh.side = x.payload, x.side
    for kept in ("counter", "low"):
        if getattr(fresh, kept) is not None and getattr(x, kept) is not None:
            setattr(fresh, kept, getattr(x, kept))
    return fresh
