"""The graph of an optimizer's step, as Dynamo hands it over, made ready for AOTAutograd.

    torch.compile(opt.step, backend="fp8")        of an optimizer that nobody has prepared

If the optimizer has plain states which should be 8-bit ones, they are exchanged and Dynamo is told to trace again,
before anything is compiled; likewise if a rate was taken for a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from fp8compile.optimizer.parameter_groups import group_rows
from fp8compile.optimizer.prepare import prepare_optimizer
from fp8compile.optimizer.state_conversion import (
    convert_states,
    is_fp8,
    is_prepared,
    parameters_of,
    recipe_of,
    record_of,
    state_rows,
)
from fp8compile.optimizer.trace import let_numbers_change, name_sources, trace_again
from fp8compile.optimizer.unscaling import unscaled_by
from fp8compile.options import Options
from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks.calls.user_frame import warn_user
from fp8compile.torch_hooks.dynamo_stage import run_step_passes


def prepare_step(opt: Optimizer, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Plan:
    """Make the states of `opt` 8-bit ones, and its graph ready for AOTAutograd.

    Returns a plan with a row for each state, to which passes add what they merge. Raises Dynamo's own signal to trace
    again if any state changed, the optimizer was not prepared, or a rate was taken for a constant.
    """
    known = is_prepared(opt)
    prepare_optimizer(opt, options.states if not known else None)
    changed = not is_captured(options) and let_numbers_change()
    if convert_states(opt, traced=True) or not known or changed:
        trace_again(gm)
    _warn_of_rounding(opt)
    unscaling = unscaled_by(opt)
    c = DynamoGraph(gm.graph, options, gm, example_inputs, is_step=True, unscaling=unscaling)
    run_step_passes(c)
    name_sources(gm, c.opened, c.added)
    states = state_rows(opt)
    return Plan("optimizer", states=states, groups=group_rows(opt, states), traced=record_of(opt).whole)


def is_captured(options: Options) -> bool:
    """Return True if a CUDA graph is made of the step, in which a number of the CPU has no place."""
    return options.replays and not options.captured  # where `capture_step` does, rates are tensors


def _warn_of_rounding(opt: Optimizer) -> None:
    """Say so where a BF16 parameter has no state that could carry what its rounding needs."""
    recipe = recipe_of(opt)
    bare = [
        p
        for p in parameters_of(opt)
        if p.grad is not None
        and recipe.rounding(p) != "nearest"
        and not any(isinstance(x, torch.Tensor) and is_fp8(x) for x in opt.state.get(p, {}).values())
    ]
    if bare:
        warn_user(
            f"fp8: {len(bare)} BF16 parameters are rounded to nearest, not {recipe.parameters}: they have no state to "
            "carry what that needs (an optimizer without states, its first step, or a parameter of one element)."
        )
