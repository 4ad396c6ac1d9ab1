"""The hook for the joint graph: it runs the passes of that stage, and keeps the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass  # the hooks' base: its uuid() keys the compile caches

from fp8compile import devices
from fp8compile.errors import OptionError
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import (
    CASTS_ARE_KEPT,
    FREED,
    FROZEN,
    TRAINED,
    Compilation,
    Input,
    device_of,
    is_tangent,
)
from fp8compile.passes.core.snapshot import Snapshot
from fp8compile.plan.plan import Plan
from fp8compile.plan.record import Record
from fp8compile.source_digest import source_digest
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.modules import nested_regions
from fp8compile.torch_hooks.observer import CompilationObserver
from fp8compile.torch_hooks.partitioner import Partitioner


@dataclass
class JointPass(CustomGraphPass):
    """Runs the passes of the joint stage on a joint (or inference) graph, and keeps the plan."""

    options: Options
    inputs: tuple[Input, ...]
    namespace: str
    dump: CompilationObserver | None = None
    record: Record | None = field(default=None, repr=False)
    optimizer: Plan | None = None  # of an optimizer's graph, which is rewritten after Inductor's own passes
    partitioner: Partitioner | None = field(default=None, repr=False)
    regions: Mapping[nested_regions.Types, Sequence[Input]] = field(default_factory=dict)
    is_done: bool = field(default=False, repr=False)  # what comes after the graph itself are halves of its regions

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, or leave it as it was when a pass fails."""
        if self.optimizer is not None:
            self._keep(self.optimizer)
        elif not self.is_done:
            self._rewrite(graph)

    def _rewrite(self, graph: fx.Graph) -> None:
        c = self._compilation(graph)
        backup = Snapshot(graph)
        if self.partitioner is not None:
            self.partitioner.see_joint(graph)
        try:
            pipeline.run_stage(c, self.dump.observer(c.name, graph) if self.dump else None)
        except Exception as error:
            self._fail(c, backup, error)
        self._keep(c.plan)

    def _fail(self, c: Compilation, backup: Snapshot, error: Exception) -> None:
        """Undo what passes have done, and say so; raise under `strict`, and where it is the user who can mend it."""
        c.plan = c.plan.undone(failures.first_line(error))
        if self.dump:
            self.dump.failed(c.name, error, c.graph, c.running)
            self.dump.plans([c.plan])  # of a compilation that ends here nothing else will be written
        if self.options.strict or isinstance(error, OptionError):
            raise error
        module: Any = c.graph.owning_module
        module.graph = as_it_was = backup.graph()
        failures.warn(error, as_it_was, self.options)

    def _keep(self, plan: Plan) -> None:
        if self.record is not None:
            self.record.add(plan)

    def _compilation(self, graph: fx.Graph) -> Compilation:
        device = devices.describe(device_of(graph))
        c = Compilation(graph, self.options, device, Plan(), self._inputs_of(graph), self.namespace)
        c.plan = Plan("training" if c.is_training else "inference", self.options.recipe.name, device.name)
        return c

    def _inputs_of(self, graph: fx.Graph) -> dict[str, Input]:
        """Return what is known of the inputs of `graph`: AOTAutograd describes those of the graph itself alone."""
        placeholders = list(graph.find_nodes(op="placeholder"))
        self.is_done = any("desc" in n.meta for n in placeholders) or not placeholders
        if not self.is_done:
            return nested_regions.match_inputs(graph, self.regions)
        trains = any(map(is_tangent, placeholders))
        indices = {n: i for n in placeholders if (i := _input_index(n)) is not None and i < len(self.inputs)}
        for node, i in indices.items():
            if self.inputs[i].is_trained and not trains:
                continue  # averages are often written into it for an evaluation, in ways that torch does not count
            if self.inputs[i].is_kept:
                node.meta[CASTS_ARE_KEPT] = TRAINED if self.inputs[i].is_trained else FROZEN
            if self.inputs[i].freed:
                node.meta[FREED] = self.inputs[i].freed
        return {node.name: self.inputs[i] for node, i in indices.items()}

    def uuid(self) -> str:
        """Return a key for the compile caches, of everything that decides what this pass does."""
        text = repr((source_digest(), self.options, self.inputs, self.namespace, torch.__version__))
        return hashlib.sha256(text.encode()).hexdigest()


def _input_index(placeholder: fx.Node) -> int | None:
    """Return which input of the Dynamo graph an input of the joint graph is; None for a gradient, a seed, …"""
    desc = placeholder.meta.get("desc")
    while desc is not None and not hasattr(desc, "idx"):
        desc = getattr(desc, "base", None)
    return None if desc is None or "Tangent" in type(placeholder.meta["desc"]).__name__ else desc.idx
