"""The hooks for forward, backward, inference and optimizer graphs: they run the passes of these stages.

A stage that fails leaves its graph as it was, with a warning; `strict` raises.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass  # the hooks' base: its uuid() keys the compile caches

from fp8compile.optimizer import state_ops
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import device_of
from fp8compile.passes.core.snapshot import Snapshot, restore_graph
from fp8compile.passes.core.stages import HalfGraph, OptimizerGraph, Stage, StageGraph
from fp8compile.passes.lower.kernel_rows import kernel_rows
from fp8compile.passes.optimizer import skip_overflow
from fp8compile.plan.rows import Lowered, MergedUpdate
from fp8compile.source_digest import source_digest
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.calls.user_frame import warn_user
from fp8compile.torch_hooks.observer import CompilationObserver


@dataclass
class EarlyHalfPass(CustomGraphPass):
    """Runs the passes that come before Inductor's own: matmuls as asynchronous tensor parallelism wants them, say."""

    options: Options

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, or leave it as it was."""
        c = HalfGraph(graph, self.options, "early", executor_for(graph, self.options), stage=Stage.EARLY_HALF)
        if any(step.when(c) for step in pipeline.passes_for(c)):
            run_or_restore(c, None, "Its matmuls are not pipelined with collectives")

    def uuid(self) -> str:
        """Return a key of the source, which decides what this pass does; `strict`, only what becomes of a failure."""
        return source_digest()


@dataclass
class LoweringPass(CustomGraphPass):
    """Makes kernels, or what Inductor compiles, of the markers in a forward, backward or inference graph."""

    options: Options
    dump: CompilationObserver | None = None
    half: str = "forward"  # which graph comes next, and what became of the last one
    lowered: Lowered | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place."""
        if has_states(graph):
            self.lowered = lower_optimizer(graph, self.options, self.dump)
            return
        executor = executor_for(graph, self.options)
        made = lower_half(HalfGraph(graph, self.options, self.half, executor), self.dump)
        late = HalfGraph(graph, self.options, self.half, executor, stage=Stage.LATE_HALF)
        failure = run_or_restore(late, None, "Inductor may lay out what its matmuls and attention read in another way")
        self.lowered = (self.lowered or Lowered()) + made + Lowered(failure=failure)

    def uuid(self) -> str:
        """Return a key of the source and the options, which decide what this pass does."""
        return hashlib.sha256(repr((source_digest(), self.options)).encode()).hexdigest()


def executor_for(graph: fx.Graph, options: Options) -> str:
    """Return who runs a graph that Inductor compiles: "triton", its code with our kernels, or "inductor", its alone."""
    on_gpu = device_of(graph).type == "cuda"
    return "triton" if on_gpu and options.kernels == "generated" else "inductor"


def has_states(graph: fx.Graph) -> bool:
    """Return True for the graph of an optimizer with 8-bit states, or of one that unscales its gradients."""
    return any(n.target in (state_ops.store_state, state_ops.unscale) for n in graph.nodes)


def lower_optimizer(graph: fx.Graph, options: Options, dump: CompilationObserver | None) -> Lowered:
    """Run the passes of optimizer graphs; where one fails, every operation of the optimizer loads and stores states."""
    c = OptimizerGraph(graph, options, skip_overflow.overflow_of(graph))
    failure = run_or_restore(c, dump, "Its updates run operator by operator, storing states in between")
    if failure:
        skip_overflow.run(OptimizerGraph(graph, options, skip_overflow.overflow_of(graph)))
        return Lowered(failure=failure)
    _warn_of_unmerged(c.lowered.updates)
    return c.lowered


def lower_half(c: HalfGraph, dump: CompilationObserver | None = None) -> Lowered:
    """Run the passes after the cut; where one fails, Inductor (or the operators) take the markers as they are."""
    if dump:
        dump.stage(c.half, "cut", c.graph)
    failure = run_or_restore(c, dump, "Its casts are compiled without generated kernels")
    if failure and c.executor == "triton":
        pipeline.run_stage(HalfGraph(c.graph, c.options, c.half, "inductor"), _observer(c, dump))
    if failure:
        return Lowered(failure=failure)
    c.lowered.kernels = c.lowered.kernels or kernel_rows(c.graph, c.half)
    return c.lowered


def run_or_restore(c: StageGraph, dump: CompilationObserver | None, consequence: str) -> str:
    """Run the passes of the stage of `c`; where one fails, restore the graph, warn with the consequence, and return
    what failed ("": nothing). Under `strict` it is raised."""
    backup = Snapshot(c.graph)
    try:
        pipeline.run_stage(c, _observer(c, dump))
    except Exception as error:
        if dump:
            dump.failed(c.name, error, c.graph, c.running)
        if c.options.strict:
            raise
        restore_graph(c.graph, backup.graph())
        failures.warn(error, c.graph, c.options, consequence)
        return failures.first_line(error)
    return ""


def _observer(c: StageGraph, dump: CompilationObserver | None) -> pipeline.Observer | None:
    return dump.observer(c.name, c.graph) if dump else None


def _warn_of_unmerged(updates: list[MergedUpdate]) -> None:
    """Say how many updates run operator by operator, and why one of them does; the plan says it of each."""
    if reasons := [u.reason for u in updates if u.reason]:
        others = ", others likewise (fp8compile.last_compile() has the reason of each)" if len(set(reasons)) > 1 else ""
        warn_user(f"fp8: {len(reasons)} parameter updates run operator by operator: {min(reasons)}{others}.")
