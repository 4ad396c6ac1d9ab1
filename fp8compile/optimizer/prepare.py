"""FP8 states for any `torch.optim.Optimizer`, explicitly.

    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    step = torch.compile(opt.step, backend="fp8")

`torch.compile(opt.step, backend="fp8")` prepares an optimizer that is not, once its first step has made all states.
Either way states become `FP8State`s where the recipe says so: those there are at once, later ones when `_init_group`
makes them, parameter by parameter, and those that an optimizer makes while it steps (SGD's momentum) when the next step
is compiled.

`state_dict()` holds `FP8State`s, which torch.save and torch.distributed.checkpoint keep; `plain_state_dict(opt)` holds
plain tensors for everybody else. `load_state_dict` takes either, and checks all of it before anything is changed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8compile.errors import OptionError, StateError
from fp8compile.optimizer import unscaling
from fp8compile.optimizer.state_recipe import Decision, StateRecipe, is_weight, salt
from fp8compile.optimizer.states import FP8State
from fp8compile.plan.rows import State
from fp8compile.state_formats import FLOAT32, StateFormat, parse_state_format
from fp8compile.torch_hooks.untraced import never_compiled

# parameter → the dict of its states, and how often each was found plain there while a step was traced
Found: TypeAlias = dict[int, tuple[dict[str, Any], Counter[str]]]
_prepared: weakref.WeakKeyDictionary[Optimizer, StateRecipe] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[Optimizer, Found] = weakref.WeakKeyDictionary()
_weights: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()  # names of states that are
_foreach: weakref.WeakKeyDictionary[Optimizer, dict[int, bool | None]] = weakref.WeakKeyDictionary()  # as groups had it
MADE_ANEW = 3  # times that a state is found plain while its step is traced: then it is not written in place


def prepare_optimizer(
    opt: Optimizer, recipe: StateRecipe | str | Mapping[str, Any] | None = None, *, unscale: bool = False
) -> Optimizer:
    """Keep the states of `opt` in 8 bits from now on, as `recipe` says (`StateRecipe.parse`); returns `opt`.

    unscale: compiled steps undo the loss scale of a GradScaler, and skip what overflowed
    (`fp8compile/optimizer/unscaling.py`). Raises `OptionError` for a recipe that means nothing, a fused optimizer (its
    kernel cannot be compiled), or one that was prepared with another recipe; and for `unscale` where steps of `opt`
    cannot be skipped on the device.
    """
    if unscale:
        unscaling.enable(opt)
    parsed = StateRecipe.parse(recipe)
    if opt in _prepared:
        if recipe is not None and _prepared[opt] != parsed:
            raise OptionError("this optimizer was prepared with another recipe; make a new one to change it")
        return opt
    refuse_fused(opt)
    _prepared[opt] = parsed
    _wrap_init_group(opt)
    opt.register_load_state_dict_pre_hook(_before_loading)
    opt.register_load_state_dict_post_hook(_settle)
    _settle(opt)
    return opt


def _settle(opt: Optimizer) -> None:
    """Convert states; and trace parameter by parameter where the rate is a float, as in foreach operators Dynamo would
    make it a constant and compile again each time it changes. What is traced is merged all the same. Only torch's own
    optimizers compute the same either way, and without a graph break. A group that was loaded as fused is not: no
    optimizer is prepared that was made so."""
    given = _foreach.setdefault(opt, {})
    for index, group in enumerate(opt.param_groups):
        if group.get("fused"):
            group["fused"] = None
        if "foreach" in group and not isinstance(group.get("lr"), Tensor) and _is_torchs(opt):
            if group["foreach"] is not False:
                given[index] = group["foreach"]
            group["foreach"] = False
    convert_states(opt)


def _is_torchs(opt: Optimizer) -> bool:
    """Whether `opt` is of a class of torch.optim, or of one that is derived from such."""
    return any(c.__module__.startswith("torch.optim.") and c is not Optimizer for c in type(opt).__mro__)


def is_prepared(opt: Optimizer) -> bool:
    """Whether the states of `opt` are kept in 8 bits."""
    return opt in _prepared


def recipe_of(opt: Optimizer) -> StateRecipe:
    """The recipe that `opt` was prepared with."""
    return _prepared[opt]


def refuse_fused(opt: Optimizer) -> None:
    """Raise `OptionError` for an optimizer whose step is one opaque kernel."""
    if any(group.get("fused") for group in opt.param_groups):
        raise OptionError(
            f"{type(opt).__name__}(fused=True) runs torch's own kernel, which torch.compile does not see into: make "
            "the optimizer without fused=True (foreach or not); its compiled step is one launch for each kind of update"
        )


@never_compiled
def convert_states(opt: Optimizer, traced: bool = False) -> bool:
    """Make `FP8State`s of the plain ones of `opt` that its recipe wants so; whether there were any.

    traced: a step is being traced. What is plain then again and again is made anew by every step, which would be
    compiled every time; it stays plain.
    """
    changed = False
    for index, parameter in enumerate(_parameters(opt)):
        if parameter in opt.state:
            changed |= _convert(opt, index, parameter, traced)
    return changed


def state_rows(opt: Optimizer, recipe: StateRecipe | None = None) -> list[State]:
    """What every state of `opt` that has a number for each element is, and why; of an optimizer that has not been
    prepared, what it would become by `recipe`."""
    prepared, rows = _prepared.get(opt), []
    chosen = prepared or StateRecipe.parse(recipe)
    for index, parameter in enumerate(_parameters(opt)):
        for name, value in opt.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                decision = _decide(opt, chosen, index, name, parameter)
                format = "" if prepared else str(decision.format or "")
                if is_fp8(value):
                    format = _local(value).format  # type: ignore[attr-defined]
                count = value.numel()
                kept = parse_state_format(format).bytes(count) if format else count * value.element_size()
                dtype = str(value.dtype).removeprefix("torch.")
                rows.append(State(index, name, tuple(value.shape), format, decision.reason, dtype, kept))
    return rows


def _times_found(opt: Optimizer, index: int, parameter: Tensor) -> Counter[str]:
    """How often each state of a parameter was found plain; a dict that is no longer there is let go."""
    found, state = _found.setdefault(opt, {}), opt.state[parameter]
    if index not in found or found[index][0] is not state:
        found[index] = state, Counter()
    return found[index][1]


def _decide(opt: Optimizer, recipe: StateRecipe, index: int, name: str, parameter: Tensor) -> Decision:
    if _times_found(opt, index, parameter)[name] >= MADE_ANEW:
        return Decision(None, "made anew at each step; in 8 bits only if it is written in place")
    if _is_shared(parameter, opt.state[parameter][name]):
        return Decision(None, "its memory is also that of a gradient or a view outside of the states")
    return _decide_of(opt, recipe, name, parameter, opt.state[parameter][name])


def _uses(x: Any) -> int:
    """How often C++ refers to `x`: once for its Python object, once for each view of it."""
    return x._use_count()


def _is_shared(parameter: Tensor, state: Tensor) -> bool:
    """Whether a plain state cannot become another one, as what else is computed of its memory would stay behind."""
    return not is_fp8(state) and (state is parameter or state is parameter.grad or _uses(state) > 1)


def _decide_of(opt: Optimizer, recipe: StateRecipe, name: str, parameter: Tensor, value: Tensor) -> Decision:
    """What the recipe says of a state with this value, unless that is weights."""
    decision = recipe.decide(name, parameter, value)
    if decision.format in (None, FLOAT32) or name in dict(recipe.formats) or is_fp8(value):
        return decision
    known = _weights.setdefault(opt, set())
    if name not in known and is_weight(name, _local(parameter), _local(value)):
        known.add(name)
    return Decision(None, "a copy or an average of the weights, not of gradients") if name in known else decision


def _convert(opt: Optimizer, index: int, parameter: Tensor, traced: bool) -> bool:
    """Make 8-bit states of the plain ones of one parameter; whether there were any."""
    recipe, state = _prepared[opt], opt.state[parameter]
    rides, changed, times = recipe.rounding(parameter), False, _times_found(opt, index, parameter)
    for name, value in state.items():
        if isinstance(value, Tensor) and is_fp8(value):
            rides = "nearest"  # what belongs to the parameter is on an earlier state
        elif isinstance(value, Tensor):
            times[name] += traced and _decide(opt, recipe, index, name, parameter).format is not None
            format = _decide(opt, recipe, index, name, parameter).format
            if format is not None:
                make = partial(FP8State.of, format=str(format), salt=salt(index, name))
                state[name] = _become(value, _mapped(value, make, rides))
                rides, changed = "nearest", True
    return changed


def _become(state: Tensor, new: Tensor) -> Tensor:
    """Make the object `state` what `new` is, and return it: a step with graph breaks may be under way, and have it in
    variables, where it would write to a tensor that is no state any more. (`torch.utils.swap_tensors`, without asking
    for weak references: Dynamo has some, of a trace that is made again.)"""
    if isinstance(state, DTensor) and isinstance(new, DTensor):
        state._local_tensor = new._local_tensor
        return state
    if type(state) is not Tensor:
        return new
    for part in ("__class__", "__dict__"):
        mine, other = getattr(state, part), getattr(new, part)
        setattr(state, part, other)
        setattr(new, part, mine)
    torch._C._swap_tensor_impl(state, new)  # type: ignore[attr-defined]
    return state


def _mapped(value: Tensor, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """`make` of the local part of `value`, sharded as `value` is."""
    if not isinstance(value, DTensor):
        return make(value, *args)
    local = make(value.to_local(), *args)
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def is_fp8(value: Tensor) -> bool:
    """Whether a state is, or is sharded from, an `FP8State`."""
    return isinstance(_local(value), FP8State)


def _parameters(opt: Optimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def _wrap_init_group(opt: Optimizer) -> None:
    """Convert states before `_init_group` hands them out. It is called for its effect first, for one parameter after
    the other, so that plain states of all are never there at once, and for all; and once more for its lists."""
    original = getattr(opt, "_init_group", None)
    if original is None:
        return
    owner = weakref.ref(opt)

    @never_compiled
    def init_group(group: Any, *lists: Any, **named: Any) -> Any:
        def make(part: Any) -> None:
            copies = [list(x) if isinstance(x, list) else x for x in lists]
            original(part, *copies, **{name: list(x) if isinstance(x, list) else x for name, x in named.items()})

        prepared = owner()
        assert prepared is not None
        if isinstance(group, dict) and "params" in group:
            _make_states(prepared, group, make)
        make(group)  # what is not made one by one: a state that is added to others, another idea of a group
        convert_states(prepared)
        return original(group, *lists, **named)

    opt._init_group = init_group  # type: ignore[attr-defined]


def _make_states(opt: Optimizer, group: dict[str, Any], make: Callable[[dict[str, Any]], None]) -> None:
    """Have `make` make states of the group's parameters that have none, and convert them at once."""
    members = set(map(id, group["params"]))
    for index, parameter in enumerate(_parameters(opt)):
        if id(parameter) in members and not opt.state.get(parameter):
            make({**group, "params": [parameter]})
            if parameter in opt.state:
                _convert(opt, index, parameter, traced=False)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def plain_state_dict(opt: Optimizer, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """`opt.state_dict()` with plain tensors of `dtype` instead of 8-bit states: a checkpoint for any optimizer.

    The missing bits of split parameters are not in it: they are the parameter's, in FP8 checkpoints only.
    """
    whole, given = opt.state_dict(), _foreach.get(opt, {})
    groups = [
        {**group, "foreach": given[index]} if index in given and group["foreach"] is False else group
        for index, group in enumerate(whole["param_groups"])
    ]
    states = {
        key: {name: _plain(value, dtype) for name, value in state.items()} for key, state in whole["state"].items()
    }
    return {**whole, "state": states, "param_groups": groups}


def _plain(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not is_fp8(value):
        return value
    return _mapped(value, lambda local: local.dequantize(dtype))


@never_compiled
def _before_loading(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check everything, then convert it: nothing of `opt` has been touched when this raises."""
    recipe, mine = _prepared[opt], _parameters(opt)
    loaded = state_dict.get("state")
    saved = [key for group in state_dict.get("param_groups", []) for key in group["params"]]
    if not isinstance(loaded, Mapping) or len(saved) != len(mine):
        raise StateError(f"the checkpoint has {len(saved)} parameters, this optimizer {len(mine)}")
    parameters = dict(zip(saved, enumerate(mine), strict=True))
    for key, state in loaded.items():
        if key not in parameters:
            raise StateError(f"the checkpoint has states of a parameter {key!r} that is in none of its groups")
        for name, value in state.items():
            _check(key, name, value, parameters[key][1])
    _weights.setdefault(opt, set()).update(_left_plain(loaded))
    states = {key: _adopted(opt, *parameters[key], state, recipe) for key, state in loaded.items()}
    return {**state_dict, "state": states}


def _check(key: Any, name: str, value: Any, parameter: Tensor) -> None:
    if not isinstance(value, Tensor) or (not is_fp8(value) and value.numel() == 1):
        return
    if value.shape != parameter.shape:
        raise StateError(
            f"state {name!r} of parameter {key} has shape {list(value.shape)}, the parameter {list(parameter.shape)}: "
            "the checkpoint is of another model"
        )
    local = _local(value)
    if isinstance(local, FP8State):
        local.check()


def _left_plain(states: Mapping[Any, Mapping[str, Any]]) -> set[str]:
    """Names of states that a checkpoint with 8-bit states has as plain tensors only: what was not to be rounded."""
    tensors = [(name, x) for state in states.values() for name, x in state.items() if isinstance(x, Tensor) and x.dim()]
    packed = {name for name, x in tensors if is_fp8(x)}
    return {name for name, _ in tensors} - packed if packed else set()


def _adopted(
    opt: Optimizer, index: int, parameter: Tensor, state: Mapping[str, Any], recipe: StateRecipe
) -> dict[str, Any]:
    """Copies of the loaded states of one parameter as `recipe` wants them, 8-bit ones bit for bit where it can be."""
    rides, adopted = recipe.rounding(parameter), {}
    for name, value in state.items():
        adopted[name] = value
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        value = value.to(parameter.device).clone()
        format = _decide_of(opt, recipe, name, parameter, value).format
        adopted[name] = value if format is not None else _plain(value, parameter.dtype)
        if format is not None:
            make = partial(_in_format, format=format, salt=salt(index, name), dtype=parameter.dtype)
            adopted[name] = _mapped(value, make, rides)
            rides = "nearest"
    return adopted


def _in_format(x: Tensor, rounding: str, format: StateFormat, salt: int, dtype: torch.dtype) -> FP8State:
    """`x` (plain, or stored in any format) as an `FP8State` that keeps of it what it can."""
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
