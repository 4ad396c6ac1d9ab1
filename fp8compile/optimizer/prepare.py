"""FP8 states for any `torch.optim.Optimizer`, explicitly.

    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    step = torch.compile(opt.step, backend="fp8")

`torch.compile(opt.step, backend="fp8")` prepares an optimizer that is not, once its first step has made all states.
Either way states become `FP8State`s where the recipe says so (`state_conversion.py`): those there are at once, later
ones when `_init_group` makes them, parameter by parameter, and those that an optimizer makes while it steps (SGD's
momentum) when the next step is compiled. `checkpoints.py` has what becomes of them in a `state_dict`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile.errors import OptionError
from fp8compile.optimizer import fused, new_states, unscaling
from fp8compile.optimizer.checkpoints import before_loading
from fp8compile.optimizer.state_conversion import convert_parameter, convert_states, parameters_of, record_of
from fp8compile.optimizer.state_recipe import StateRecipe
from fp8compile.optimizer.torch_methods import REPLACED, is_torchs, original_method, replaced
from fp8compile.torch_hooks.calls.untraced import never_compiled


def prepare_optimizer(
    opt: Optimizer, recipe: StateRecipe | str | Mapping[str, Any] | None = None, *, unscale: bool = False
) -> Optimizer:
    """Keep the states of `opt` in 8 bits from now on, as `recipe` says (`StateRecipe.parse`); return `opt`.

    unscale: compiled steps undo the loss scale of a GradScaler, and skip what overflowed
    (`fp8compile/optimizer/unscaling.py`). Raises `OptionError` for a recipe that means nothing, a fused optimizer that
    is not torch's own (its kernel cannot be compiled), or one that was prepared with another recipe; and for `unscale`
    where steps of `opt` cannot be skipped on the device.
    """
    if unscale:
        unscaling.enable(opt)
    parsed, record = StateRecipe.parse(recipe), record_of(opt)
    if record.recipe is not None:
        if recipe is not None and record.recipe != parsed:
            raise OptionError("this optimizer was prepared with another recipe; make a new one to change it")
        return opt
    if fused.is_fused(opt):
        _refuse_foreign_kernel(opt)
        fused.take_over(opt)
    record.recipe = parsed
    _wrap_init_group(opt)
    opt.register_load_state_dict_pre_hook(before_loading)
    opt.register_load_state_dict_post_hook(_settle)
    _settle(opt)
    return opt


def _settle(opt: Optimizer) -> None:
    """Convert states, and choose settings of groups with which steps compile well.

    Where the rate is a float, a step is traced parameter by parameter: in foreach operators Dynamo would make the rate
    a constant, and compile again each time it changes. What is traced is merged all the same. Only torch's own
    optimizers compute the same either way, and without a graph break. A group that was loaded as fused is made not
    fused.
    """
    given = record_of(opt).foreach
    for index, group in enumerate(opt.param_groups):
        if group.get("fused"):
            fused.take_over_group(group)
        if "foreach" in group and not isinstance(group.get("lr"), Tensor) and _is_of_torch(opt):
            if group["foreach"] is not False:
                given[index] = group["foreach"]
            group["foreach"] = False
    convert_states(opt)


def _is_of_torch(opt: Optimizer) -> bool:
    """Return True if `opt` is of a class of torch.optim, or of one that is derived from such."""
    return any(c.__module__.startswith("torch.optim.") and c is not Optimizer for c in type(opt).__mro__)


def _refuse_foreign_kernel(opt: Optimizer) -> None:
    """Raise `OptionError` for a fused optimizer of which nobody knows what it is without the flag."""
    if not is_torchs(opt, "step"):
        raise OptionError(
            f"{type(opt).__name__}(fused=True) has a step of its own, and torch.compile does not see into its kernel: "
            "make the optimizer without fused=True; its compiled step is one launch for each kind of update"
        )


def _wrap_init_group(opt: Optimizer) -> None:
    """Have the class of `opt` convert states of prepared optimizers before its `_init_group` hands them out; and hand
    out none in a step that has updated them already.

    It is a method of the class, not of the object: torch from 2.15 on traces the call of a method as one step, and
    breaks the graph at a function that an object has.
    """
    owner = next((c for c in type(opt).__mro__ if "_init_group" in vars(c)), None)
    if owner is None or replaced(vars(owner)["_init_group"]):
        return
    original = vars(owner)["_init_group"]

    def _init_group(self: Optimizer, group: Any, *lists: Any, **named: Any) -> Any:
        record = record_of(self)
        if record.recipe is not None:
            if record.take is not None and isinstance(group, dict) and record.take(self, group):
                return original(self, {**group, "params": []}, *lists, **named)
            _ensure(self, group, original.__get__(self), lists, named)
        return original(self, group, *lists, **named)

    setattr(_init_group, REPLACED, original)  # before it is wrapped: Dynamo takes wrappers off, and puts on others
    owner._init_group = never_compiled(_init_group)  # type: ignore[attr-defined]


def ensure_states(opt: Optimizer, group: dict[str, Any]) -> None:
    """Make the states of a group that are to be made before a step, and convert them.

    For torch's own optimizers: what `_init_group` takes beside the group are lists.
    """
    method = original_method(opt, "_init_group")
    assert method is not None  # torch's own have one
    original = method.__get__(opt)
    lists = [[] for _ in list(inspect.signature(original).parameters)[1:]]
    with torch.no_grad():
        _ensure(opt, group, original, lists, {})


def _ensure(opt: Optimizer, group: Any, original: Callable[..., Any], lists: Any, named: Mapping[str, Any]) -> None:
    """Have `original` make the states of a group, and convert them.

    It is called for its effect first, for one parameter after the other, so that plain states of all are never there
    at once, and for all; its lists come later.
    """

    def make(part: Any) -> None:
        copies = [list(x) if isinstance(x, list) else x for x in lists]
        original(part, *copies, **{name: list(x) if isinstance(x, list) else x for name, x in named.items()})

    if isinstance(group, dict) and "params" in group:
        _make_states(opt, group, make)
    make(group)  # what is not made one by one: a state that is added to others, another idea of a group
    convert_states(opt)


def _make_states(opt: Optimizer, group: dict[str, Any], make: Callable[[dict[str, Any]], None]) -> None:
    """Have `make` make the states of the group's parameters that have none, and convert them at once."""
    members = set(map(id, group["params"]))
    for index, parameter in enumerate(parameters_of(opt)):
        if id(parameter) in members and not opt.state.get(parameter):
            with new_states.as_numbers(opt, parameter):
                make({**group, "params": [parameter]})
            if parameter in opt.state:
                convert_parameter(opt, index, parameter, traced=False)
                new_states.fill(opt.state[parameter], parameter)
