"""The pipeline of optimizer graphs: every pass in order, as `passes/pipeline.py` is that of models.

It runs where kernels are made of the halves of a model: last, so that nothing of Inductor's comes after it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp8compile import state_ops
from fp8compile.passes import forward_states, merge_updates, skip_overflow, stack_numbers
from fp8compile.passes.graph_text import graph_text
from fp8compile.plan import MergedUpdate


def has_states(graph: fx.Graph) -> bool:
    """Whether this is the graph of an optimizer with 8-bit states, or of one that unscales its gradients."""
    return any(n.target in (state_ops.store_state, state_ops.unscale) for n in graph.nodes)


def run_optimizer(graph: fx.Graph, observe: Callable[[str, str], None] | None = None) -> list[MergedUpdate]:
    """Rewrite an optimizer graph in place; returns what was merged. `observe(stage, text)` sees it after each pass."""

    def show(stage: str) -> None:
        if observe:
            observe(stage, graph_text(graph))

    show("input")
    overflow = skip_overflow.overflow_of(graph)
    forward_states.run(graph)  # first: then an update is one expression from what was stored to what is stored
    show("forward_states")
    rows = merge_updates.run(graph)  # finds the expressions, and makes one operator of equal ones
    show("merge_updates")
    stack_numbers.run(graph)  # now it is known which numbers belong together
    show("stack_numbers")
    if overflow is not None:
        skip_overflow.run(graph, overflow)  # last: what is merged skips by itself
        show("skip_overflow")
    return rows
