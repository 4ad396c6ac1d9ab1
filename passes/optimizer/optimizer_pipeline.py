"""The pipeline of optimizer graphs: every pass in order, as `passes/pipeline.py` is that of models.

It runs where kernels are made of the halves of a model: last, so that nothing of Inductor's comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import attach_views
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.verify import signature
from fp8compile.passes.optimizer import batch_scalars, merge_updates, skip_overflow, store_load_forwarding
from fp8compile.passes.optimizer.verify_optimizer import beside_states, verify_optimizer, written_inputs
from fp8compile.plan.rows import MergedUpdate


@dataclass(frozen=True)
class Step:
    """A step of the pipeline: a name, what it does to a graph whose scaled loss overflowed where a node says so, and
    why it stands where it stands. It returns what it merged, or None.

    scaled: it has something to do only where a loss is scaled.
    """

    name: str
    run: Callable[[fx.Graph, fx.Node | None], list[MergedUpdate] | None]
    why: str
    scaled: bool = False


OPTIMIZER = (
    Step(
        "forward_states",
        lambda graph, _: store_load_forwarding.run(graph),
        "first: then an update is one expression from what was stored to what is stored",
    ),
    Step(
        "merge_updates",
        lambda graph, _: merge_updates.run(graph),
        "finds the expressions, and makes one operator of equal ones",
    ),
    Step(
        "stack_numbers",
        lambda graph, _: batch_scalars.run(graph),
        "now it is known which numbers belong together",
    ),
    Step("skip_overflow", skip_overflow.run, "last: what is merged skips by itself", scaled=True),
)


def has_states(graph: fx.Graph) -> bool:
    """Whether this is the graph of an optimizer with 8-bit states, or of one that unscales its gradients."""
    return any(n.target in (state_ops.store_state, state_ops.unscale) for n in graph.nodes)


def run_optimizer(
    graph: fx.Graph, observe: Callable[[str, str], None] | None = None, check: bool = True
) -> list[MergedUpdate]:
    """Rewrite an optimizer graph in place, verifying after each pass if `check`; returns what was merged.
    `observe(stage, text)` sees it after each pass."""
    overflow = skip_overflow.overflow_of(graph)
    before = signature(graph), written_inputs(graph), beside_states(graph)
    rows: list[MergedUpdate] = []
    if observe:
        observe("input", graph_text(graph))
    for step in OPTIMIZER:
        if overflow is None and step.scaled:
            continue
        rows += step.run(graph, overflow) or []
        attach_views(graph)
        if check:
            verify_optimizer(graph, step.name, *before)
        if observe:
            observe(step.name, graph_text(graph))
    return rows
