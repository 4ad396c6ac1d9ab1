"""Plain states of an optimizer become `FP8State`s, where its recipe wants them so.

A state stays plain that the recipe leaves, that is weights and not moments (`state_recipe.is_weight`), that shares its
memory with a gradient or a view, or that every step makes anew. What was decided for an optimizer, and what was seen
of its states, is kept in its `Record`, as long as the optimizer lives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8compile.optimizer.state_recipe import Decision, StateRecipe, is_weight, salt
from fp8compile.optimizer.states import FP8State
from fp8compile.plan.rows import State
from fp8compile.state_formats import FLOAT32, parse_state_format
from fp8compile.torch_hooks.calls.untraced import never_compiled
from fp8compile.torch_hooks.local_parts import local_part, set_local_part, sharded_like

# by number of the parameter: the dict of its states, and how often each was found plain there while a step was traced
Found: TypeAlias = dict[int, tuple[dict[str, Any], Counter[str]]]
MADE_ANEW = 3  # times that a state is found plain while its step is traced: then it is not written in place


@dataclass
class Record:
    """The facts that are kept about one optimizer.

    recipe: the one that it was prepared with, None before; weights: names of states that are weights; foreach,
    fused: settings of groups as they were before the optimizer was prepared, by their number; take: while a step runs
    that is not compiled as a whole (`fp8compile/optimizer/shared_step/`), what updates a group; whole: why steps are.
    """

    recipe: StateRecipe | None = None
    found: Found = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    foreach: dict[int, bool | None] = field(default_factory=dict)
    fused: dict[int, bool] = field(default_factory=dict)
    take: Callable[[Optimizer, Any], bool] | None = None
    whole: str = ""


_records: weakref.WeakKeyDictionary[Optimizer, Record] = weakref.WeakKeyDictionary()


def record_of(opt: Optimizer) -> Record:
    """Return the record of `opt`, an empty one where nothing is known yet."""
    found = _records.get(opt)
    if found is None:
        found = _records[opt] = Record()
    return found


def is_prepared(opt: Optimizer) -> bool:
    """Return True if the states of `opt` are kept in 8 bits."""
    return record_of(opt).recipe is not None


def recipe_of(opt: Optimizer) -> StateRecipe:
    """Return the recipe that `opt` was prepared with."""
    recipe = record_of(opt).recipe
    assert recipe is not None
    return recipe


def parameters_of(opt: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [p for group in opt.param_groups for p in group["params"]]


def is_fp8(value: Tensor) -> bool:
    """Return True if a state is, or is sharded from, an `FP8State`."""
    return isinstance(local_part(value), FP8State)


# ---- decisions ------------------------------------------------------------------------------------------------------


def state_rows(opt: Optimizer, recipe: StateRecipe | None = None) -> list[State]:
    """Return a row for each state of `opt` that has a number for each element: what it is, and why.

    Of an optimizer that has not been prepared: what it would become by `recipe`.
    """
    prepared, rows = record_of(opt).recipe, []
    chosen = prepared or StateRecipe.parse(recipe)
    for index, parameter in enumerate(parameters_of(opt)):
        for name, value in opt.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                decision = _decide(opt, chosen, index, name, parameter)
                format = "" if prepared else str(decision.format or "")
                if is_fp8(value):
                    format = local_part(value).format
                count = value.numel()
                kept = parse_state_format(format).bytes(count) if format else count * value.element_size()
                dtype = str(value.dtype).removeprefix("torch.")
                rows.append(State(index, name, tuple(value.shape), format, decision.reason, dtype, kept))
    return rows


def _decide(opt: Optimizer, recipe: StateRecipe, index: int, name: str, parameter: Tensor) -> Decision:
    if _times_found(opt, index, parameter)[name] >= MADE_ANEW:
        return Decision(None, "made anew at each step; in 8 bits only if it is written in place")
    if _is_shared(parameter, opt.state[parameter][name]):
        return Decision(None, "its memory is also that of a gradient or a view outside of the states")
    return decide(opt, recipe, name, parameter, opt.state[parameter][name])


def _times_found(opt: Optimizer, index: int, parameter: Tensor) -> Counter[str]:
    """Return how often each state of a parameter was found plain; a dict that is no longer there is let go."""
    found, state = record_of(opt).found, opt.state[parameter]
    if index not in found or found[index][0] is not state:
        found[index] = state, Counter()
    return found[index][1]


def _is_shared(parameter: Tensor, state: Tensor) -> bool:
    """Return True if a plain state cannot become another one, as what else uses its memory would stay behind."""
    return not is_fp8(state) and (state is parameter or state is parameter.grad or _uses(state) > 1)


def _uses(x: Any) -> int:
    """Return how often C++ refers to `x`: once for its Python object, once for each view of it."""
    return x._use_count()


def decide(opt: Optimizer, recipe: StateRecipe, name: str, parameter: Tensor, value: Tensor) -> Decision:
    """Return what the recipe says of a state with this value, unless that is weights."""
    decision = recipe.decide(name, parameter, value)
    if decision.format in (None, FLOAT32) or name in dict(recipe.formats) or is_fp8(value):
        return decision
    known = record_of(opt).weights
    if name not in known and is_weight(name, local_part(parameter), local_part(value)):
        known.add(name)
    return Decision(None, "a copy or an average of the weights, not of gradients") if name in known else decision


# ---- conversion -----------------------------------------------------------------------------------------------------


@never_compiled
def convert_states(opt: Optimizer, traced: bool = False) -> bool:
    """Make `FP8State`s of the plain states of `opt` that its recipe wants so; return True if there were any.

    traced: a step is being traced. What is plain then again and again is made anew by every step, which would be
    compiled every time; it stays plain.
    """
    changed = False
    for index, parameter in enumerate(parameters_of(opt)):
        if parameter in opt.state:
            changed |= convert_parameter(opt, index, parameter, traced)
    return changed


def convert_parameter(opt: Optimizer, index: int, parameter: Tensor, traced: bool) -> bool:
    """Make 8-bit states of the plain ones of one parameter; return True if there were any."""
    recipe, state = recipe_of(opt), opt.state[parameter]
    rounding, changed, times = recipe.rounding(parameter), False, _times_found(opt, index, parameter)
    for name, value in state.items():
        if isinstance(value, Tensor) and is_fp8(value):
            rounding = "nearest"  # what belongs to the parameter is on an earlier state
        elif isinstance(value, Tensor):
            times[name] += traced and _decide(opt, recipe, index, name, parameter).format is not None
            format = _decide(opt, recipe, index, name, parameter).format
            if format is not None:
                new = FP8State.of(local_part(value), rounding, format=str(format), salt=salt(index, name))
                state[name] = _become(value, sharded_like(value, new))
                rounding, changed = "nearest", True
    return changed


def _become(state: Tensor, new: Tensor) -> Tensor:
    """Make the object `state` what `new` is, and return it.

    A step with graph breaks may be under way, and have the object in variables: it would write to a tensor that is no
    state any more. Done like `torch.utils.swap_tensors`, which refuses what has weak references: Dynamo has some, of a
    trace that is made again.
    """
    if isinstance(state, DTensor) and isinstance(new, DTensor):
        set_local_part(state, local_part(new))
        return state
    if type(state) is not Tensor:
        return new
    for part in ("__class__", "__dict__"):
        mine, other = getattr(state, part), getattr(new, part)
        setattr(state, part, other)
        setattr(new, part, mine)
    torch._C._swap_tensor_impl(state, new)  # type: ignore[attr-defined]
    FP8State.moves += 1
    return state
