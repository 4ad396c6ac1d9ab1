"""The baseline of a dump: the joint graph as it came, cut by torch's own partitioner."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition  # what runs without a hook of ours

from fp8compile.insight.dump.dumps import Dump
from fp8compile.insight.dump.memory import timeline
from fp8compile.options import Options
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.plan.record import Record
from fp8compile.torch_hooks.partitioner import Partitioner, with_static_parts


class DumpingPartitioner(Partitioner):
    """Our partitioner, which also writes memory over time: of its two halves, and of the halves that torch would make.

    before: the joint graph before any pass.
    """

    def __init__(self, options: Options, record: Record, dump: Dump):
        super().__init__(options, record)
        self.dump = dump
        self.before: fx.GraphModule | None = None

    def see_joint(self, graph: fx.Graph) -> None:
        """Keep a copy of the joint graph before any pass."""
        self.before = fx.GraphModule(graph.owning_module or {}, copy_graph(graph))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Return (forward, backward) of `gm`, as `Partitioner` makes them."""
        known = with_static_parts(gm, kwargs)
        placeholders = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        static = {placeholders[i] for i in known.get("static_lifetime_input_indices") or []}
        if self.before is not None:
            try:
                halves = min_cut_rematerialization_partition(self.before, joint_inputs, **known)
                self._keep("bf16", halves, static)
            except Exception as error:  # a comparison must not cost the compilation
                logging.getLogger("fp8compile").info("no BF16 baseline in the dump: %s", error)
        halves = super().__call__(gm, joint_inputs, **kwargs)
        self._keep("compiled", halves, static)
        return halves

    def _keep(self, kind: str, halves: tuple[fx.GraphModule, fx.GraphModule], static: set[str]) -> None:
        for half, module in zip(("forward", "backward"), halves, strict=True):
            self.dump.memory(kind, half, timeline(module.graph, static))
            if kind == "bf16":
                self.dump.stage(half, "bf16", module.graph)
