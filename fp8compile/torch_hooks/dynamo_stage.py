"""Where passes run on Dynamo's graph: one that fails leaves graph and buffers as they were, with a warning.

The graph of a model is then compiled without FP8, as where a pass of the joint graph fails: its derivatives may not be
marked. In the step of an optimizer every operation loads and stores the states, which are whole again; gradients of a
scaled loss are unscaled all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile.errors import StateError
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.snapshot import ModuleSnapshot
from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.passes.optimizer import unscale_gradients
from fp8compile.plan import plan_warnings
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.modules import whole_paths

OF_A_STEP = "Every operation of this step loads and stores 8-bit states, which is slower"


def name_modules(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> dict[str, str]:
    """Name modules from the compiled model on; return whole names of parameters (`whole_paths.complete_paths`)."""
    try:
        names = whole_paths.complete_paths(gm, example_inputs)
        if names.model is not None and (options.skip or options.save):
            plan_warnings.note_layers(names.model, names.layers)
        return names.inputs
    except Exception as error:
        if options.strict:
            raise
        failures.warn(error, gm.graph, options, "After a graph break modules are named from there on")
        return {}


def run_model_passes(c: DynamoGraph) -> Options:
    """Run the passes on the graph of a model, and return the options with which it is to be compiled."""
    if _run_or_restore(c):
        return c.options
    return replace(c.options, skip=("*",))


def run_step_passes(c: DynamoGraph) -> None:
    """Run the passes on the graph of an optimizer's step. Raises `StateError` where that is the user's to mend."""
    if not _run_or_restore(c, OF_A_STEP) and c.unscaling is not None:
        unscale_gradients.run(c)  # without it the step would be wrong; where it cannot be done, it raises


def _run_or_restore(c: DynamoGraph, *consequence: str) -> bool:
    """Run the passes and return True, or restore the graph, warn, and return False. Under `strict` a failure raises."""
    backup = ModuleSnapshot(c.gm)
    try:
        pipeline.run_stage(c)
    except Exception as error:
        if c.options.strict or isinstance(error, StateError):
            raise
        backup.restore()
        c.graph = c.gm.graph
        c.opened.clear()
        c.added.clear()
        failures.warn(error, c.graph, c.options, *consequence)
        return False
    return True
