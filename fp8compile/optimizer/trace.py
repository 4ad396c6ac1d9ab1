"""`torch.compile(opt.step, backend="fp8")` on an optimizer that nobody prepared.

Dynamo hands a backend a graph, not the optimizer; but while it does, the frame that it traces is at hand, and its
`self` is the optimizer. If that has plain states which should be 8-bit ones, they are exchanged and Dynamo is told to
trace again, before anything is compiled; likewise if a rate was taken for a constant. Private API of torch, imported
here only; where it finds nothing, the graph is compiled with the states as they are, and `fp8compile.prepare_optimizer`
does the same explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # the restart that keeps what was learned of scalars
from torch._dynamo.pgo import auto_dynamic, get_code_state  # what it takes for constant
from torch._dynamo.source import AttrSource  # a part of what has a source
from torch.optim import Optimizer

from fp8compile.optimizer import prepare, unscaling
from fp8compile.optimizer.parameter_groups import group_rows
from fp8compile.options import Options
from fp8compile.passes.optimizer import hoist_state_load_store, open_states, refuse_view_writes, spread_scalars
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import MergedUpdate
from fp8compile.torch_hooks import compiled_calls
from fp8compile.torch_hooks.compilations import translator
from fp8compile.torch_hooks.user_frame import warn_user


def traced_optimizer(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Optimizer | None:
    """The optimizer whose step this graph is; None for any other graph.

    Its `self` or first argument is an optimizer; or a local variable is one, and the graph has states of it.
    """
    tx = translator()
    if tx is None:
        return None
    root = tx.output.root_tx or tx
    frame = dict(root.f_locals)
    first = [frame.get("self"), *list(frame.get("args") or ())[:1]]
    if found := next((x for x in first if isinstance(x, Optimizer)), None):
        return found
    near = [getattr(x, "__self__", x) for x in frame.values()]
    inputs = {id(x) for x in (*example_inputs, *gm.__dict__.get("_buffers", {}).values(), *gm.__dict__.values())}
    found = next((x for x in near if isinstance(x, Optimizer) and inputs & _state_ids(x)), None)
    if found is None and _is_part_of_a_step(root) and not compiled_calls.step_is_told():
        _say(
            f"{root.f_code.co_name} of {root.f_globals['__name__']} is compiled by itself, not the step of an "
            "optimizer: its states stay as they are. Dynamo traces no step of this class as a whole any more after one "
            "that it could not compile, as with fused=True: call torch._dynamo.reset(), and leave fused=True out"
        )
    return found


def _is_part_of_a_step(root: Any) -> bool:
    """Whether what is compiled is a function of torch.optim that only writes the results of a step."""
    module = str(root.f_globals.get("__name__"))
    others = ("torch.optim.swa_utils", "torch.optim.lr_scheduler")
    return module.startswith("torch.optim.") and module not in others and not torch.is_grad_enabled()


def _state_ids(opt: Optimizer) -> set[int]:
    return {id(x) for state in opt.state.values() for x in state.values() if isinstance(x, torch.Tensor)}


def plan_of(opt: Optimizer, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Plan:
    """Make the states of `opt` 8-bit ones, and its graph ready for AOTAutograd.

    Returns a plan with a row for each state, to which passes add what they merge. Raises Dynamo's own signal to trace
    again if any state changed, the optimizer was not prepared, or a rate was taken for a constant.
    """
    known = prepare.is_prepared(opt)
    prepare.prepare_optimizer(opt, options.states if not known else None)
    changed = not _is_captured(options) and _let_rates_change()
    if prepare.convert_states(opt, traced=True) or not known or changed:
        tx = translator()
        assert tx is not None  # who traces a step can trace it again
        tx.speculation_log.clear()  # the next trace may take another path
        gm._buffers.clear()  # Dynamo keeps this graph as long as the optimizer lives: the plain states go now
        raise TensorifyScalarRestartAnalysis(restart_reason="optimizer states became FP8, rates symbolic")
    _warn_of_rounding(opt)
    refuse_view_writes.run(gm)
    spread_scalars.run(gm)
    hoist_state_load_store.run(gm)
    opened, added = open_states.run(gm), unscaling.insert(opt, gm, example_inputs)
    if (sources := gm.__dict__.get("_param_name_to_source")) is not None:  # AOTAutograd asks where a buffer comes from
        sources |= {name: AttrSource(sources[state], part) for name, (state, part) in opened.items()}
        sources |= {name: AttrSource(next(iter(sources.values())), name) for name in added}  # one that it will not meet
    states = prepare.state_rows(opt)
    return Plan("optimizer", states=states, groups=group_rows(opt, states))


def _is_captured(options: Options) -> bool:
    """Whether a CUDA graph is made of the step, in which a number of the CPU has no place."""
    settings = dict(options.inductor)
    return options.mode in ("reduce-overhead", "max-autotune") or bool(settings.get("triton.cudagraphs"))


def _let_rates_change() -> bool:
    """Have Dynamo take learning rates as numbers that may change, as it does by itself when it first meets another one:
    a schedule then costs no second compilation. Returns whether it took one as a constant."""
    found = [
        entry
        for state in get_code_state().values()
        for name, entry in state.automatic_dynamic.items()
        if "param_groups" in name and name.endswith("['lr']") and isinstance(entry.scalar, float)
    ]
    for entry in found:
        entry.scalar = auto_dynamic
    return bool(found)


def warn_of_unmerged(updates: list[MergedUpdate]) -> None:
    """Say how many updates run operator by operator, and why one of them does; the plan says it of each."""
    if reasons := [u.reason for u in updates if u.reason]:
        others = ", others likewise (fp8compile.last_compile() has the reason of each)" if len(set(reasons)) > 1 else ""
        _say(f"{len(reasons)} parameter updates run operator by operator: {min(reasons)}{others}")


def _warn_of_rounding(opt: Optimizer) -> None:
    """Say so where a BF16 parameter has no state that could carry what its rounding needs."""
    recipe = prepare.recipe_of(opt)
    bare = [
        p
        for group in opt.param_groups
        for p in group["params"]
        if p.grad is not None
        and recipe.rounding(p) != "nearest"
        and not any(map(_is_state, opt.state.get(p, {}).values()))
    ]
    if bare:
        _say(
            f"{len(bare)} BF16 parameters are rounded to nearest, not {recipe.parameters}: they have no state to carry "
            "what that needs (an optimizer without states, its first step, or a parameter of one element)"
        )


def _is_state(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and prepare.is_fp8(x)


def _say(message: str) -> None:
    warn_user(f"fp8: {message}.")
