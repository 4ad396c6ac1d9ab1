"""All that a process keeps from one compilation or step to the next: one list, and one `reset()`.

    process_state.reset()      forget it all, torch's compiled code too: tests and benchmarks begin with this
    torch.compiler.reset()     forgets torch's compiled code and, of this list, the rows `until` TORCH_RESET

A module keeps such state in a variable in lower case, which has a row here; names in capitals are constants, which
nobody writes to. What is kept under a `functools.cache` has no row: the rule is that such a function depends on its
arguments, the installed source and the machine alone, never on what was compiled before, so its answers stay true.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

PACKAGE = __name__.rpartition(".")[0]


class Until(Enum):
    """The events that end the life of the entries of a store."""

    TORCH_RESET = "torch.compiler.reset(), and reset()"
    RESET = "reset()"
    OWNER = "the end of the object or the call that each entry belongs to"
    PROCESS = "the end of the process"


@dataclass(frozen=True)
class Store:
    """A variable that keeps state. module: its name below `fp8compile`."""

    module: str
    variable: str
    holds: str
    until: Until

    def value(self) -> Any:
        """Return what the variable holds now; None where its module has not been imported."""
        module = sys.modules.get(f"{PACKAGE}.{self.module}")
        return None if module is None else getattr(module, self.variable)


STORES = (
    Store("embedding_tables", "_tables", "parameters in which graphs look up rows", Until.OWNER),
    Store("plan.store", "_compiled", "plans of all graphs, by the calls that compiled them", Until.TORCH_RESET),
    Store("host_copies", "_streams", "a stream a GPU that copies to the host and back", Until.PROCESS),
    Store("host_copies", "_running", "copies that nobody has waited for yet", Until.OWNER),
    Store("cuda_capture", "_steps", "steps that run now, and are captured now or later", Until.OWNER),
    Store("cuda_capture", "_kept", "what CUDA graphs read that others captured, whenever they run", Until.PROCESS),
    Store(
        "plan.plan_warnings",
        "_layers",
        "layers of models that are compiled, and whether a graph had them",
        Until.TORCH_RESET,
    ),
    Store("plan.plan_warnings", "_matched", "patterns of options that matched, or were warned of", Until.TORCH_RESET),
    Store("torch_hooks.calls.compiled_calls", "_given_up", "code that Dynamo compiles no more", Until.TORCH_RESET),
    Store("torch_hooks.calls.graph_runs", "runs", "how many graphs were asked for, and ran", Until.RESET),
    Store("torch_hooks.calls.graph_runs", "_listeners", "who listens to runs, while it does", Until.OWNER),
    Store("torch_hooks.calls.late_host", "_looked", "how often the GPU waited for the host", Until.RESET),
    Store("torch_hooks.calls.compiled_calls", "_steps", "the steps of optimizers that are running", Until.OWNER),
    Store("torch_hooks.calls.trainers", "_warned", "optimizers of Trainers that were warned of", Until.RESET),
    Store("delayed", "_histories", "amax histories of delayed scaling, by key", Until.RESET),
    Store("delayed", "_before", "each history as it was before its last entry", Until.RESET),
    Store("delayed", "_passes", "the forward and backward pass that each model is in", Until.RESET),
    Store("delayed", "_loaded", "keys of amax histories that were loaded and not read since", Until.RESET),
    Store("delayed", "_models", "models with delayed scaling, by the number in their keys", Until.RESET),
    Store("plan.cast_statistics", "_watched", "what is being measured, by name", Until.RESET),
    Store("adaptive.adaptive_graph", "_all", "graphs in automatic mode", Until.RESET),
    Store("optimizer.state_conversion", "_records", "the recipe of each optimizer, and its states' past", Until.OWNER),
    Store("optimizer.unscaling", "_unscaling", "the loss scale that each optimizer's steps read", Until.OWNER),
    Store("optimizer.shared_step.shared_step", "_shared", "how each optimizer's steps are taken", Until.TORCH_RESET),
    Store("optimizer.shared_step.shared_step", "_templates", "rules of updates, by kind", Until.TORCH_RESET),
    Store("optimizer.shared_step.replayed", "_pools", "memory of graphs of updates, by stream", Until.OWNER),
    Store("optimizer.shared_step.template", "_compiled", "functions of numbers, by their code", Until.TORCH_RESET),
    Store(
        "torch_hooks.kept_casts",
        "_values",
        "payloads and scales of weights; of freed ones they stay",
        Until.TORCH_RESET,
    ),
    Store("weight_uses", "_uses", "how graphs read each weight, its steps, and whether it was freed", Until.OWNER),
    Store("weight_uses", "_steps", "the hook after every optimizer's step, once a cast is kept", Until.RESET),
    Store("weight_uses", "_matrices", "what freed weights of several matrices show", Until.OWNER),
    Store("distributed.weight_cast", "_casts", "casts of sharded weights, by number", Until.OWNER),
    Store("kernels.optimizer.update_launch", "_tables", "addresses of parameters and states, by launch", Until.RESET),
    Store("kernels.optimizer.compile_ahead", "_begun", "threads that compile", Until.PROCESS),
    Store("passes.lower.known_accesses", "_known", "what kernels access", Until.PROCESS),
    Store("plan.printers", "printers", "functions of insight that show plans", Until.PROCESS),
    Store("registration", "_registered", "names of the backend, and their options", Until.PROCESS),
    Store("torch_hooks.patches", "_applied", "changes to torch that have been made", Until.PROCESS),
    Store("distributed.sharded_weight", "_serials", "the next number of a sharded weight", Until.PROCESS),
    Store("distributed.weight_cast", "_keys", "the next number of a cast", Until.PROCESS),
    Store("distributed.weight_scales", "_hooks", "the hook after every optimizer's step, if needed", Until.PROCESS),
    Store("insight.watching", "_numbers", "the next number of a watched model", Until.PROCESS),
)


def reset() -> None:
    """Forget what this process has compiled, measured and warned of, and torch's compiled code.

    Objects that live keep what belongs to them: a prepared optimizer stays prepared, compiled functions compile again.
    """
    torch.compiler.reset()  # reaches this backend only if it has compiled something since the last time
    _clear(Until.TORCH_RESET, Until.RESET)


def reset_with_torch() -> None:
    """Forget what `torch.compiler.reset()` is to forget; torch calls this through the backend."""
    _clear(Until.TORCH_RESET)


def reset_module(name: str) -> None:
    """Forget what the module called `name` (its `__name__`) keeps."""
    for store in STORES:
        if f"{PACKAGE}.{store.module}" == name:
            store.value().clear()


def _clear(*lifetimes: Until) -> None:
    for store in STORES:
        if store.until in lifetimes and (value := store.value()) is not None:
            value.clear()
