"""Mark what a model differentiates within itself: on Dynamo's graph, which alone shows where a derivative is taken.

    %_jvp_increment_nesting      …      or _enter_dual_level, or _grad_increment_nesting
    %linear, %tanh, …                   marked: their primals, tangents and inner gradients, whatever they become
    %_jvp_decrement_nesting      …

A loss of derivatives (the residual of a differential equation, a force, a gradient penalty) is a difference of what
those are, and weights rounded to FP8 are those of another function: the square of a residual was 7 % off with rounded
weights, and up to 77 %, where one of values was 3 % off. So all of it keeps its precision: its matmuls
(`passes/matmul/select_matmuls.py`), and what backward keeps of it (`passes/save/rounding_hazards.py`). After
AOTAutograd a tangent's matmul is one as any other; the mark, which torch hands from a node to what is traced of it,
tells them apart.

Sound because only metadata is written. With `vmap` alone nothing is differentiated, and nothing is marked.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.passes.core.walk import walk

MARK = "fp8_differentiated"
BEGINS = {"_jvp_increment_nesting", "_grad_increment_nesting", "_enter_dual_level"}
PULLBACK = "_autograd_grad"  # may wait until the nesting is over
ENDS = {"_jvp_decrement_nesting", "_grad_decrement_nesting", "_exit_dual_level"}


def run(c: DynamoGraph) -> None:
    """Mark the nodes of a graph, and of those that it calls, from which derivatives are made."""
    mark(c.gm)


def is_differentiated(node: fx.Node) -> bool:
    """Return True if `node` takes part in a derivative that the model itself takes."""
    return MARK in node.meta.get("custom", {})


def mark(gm: fx.GraphModule, everything: bool = False) -> None:
    """Mark the nodes of `gm` within derivatives, or all of them, and those of graphs that these call."""
    open_ones = 0
    by_autograd = set().union(*map(_by_autograd, gm.graph.nodes))
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        open_ones += (name in BEGINS) - (name in ENDS)
        within = everything or open_ones > 0 or node in by_autograd
        if within:
            node.meta["custom"] = {**node.meta.get("custom", {}), MARK: True}
        for called in _called(gm, node):
            mark(called, within)


def _by_autograd(node: fx.Node) -> set[fx.Node]:
    """Return a call of autograd, and the nodes that lead to what it differentiates from what it does so by."""
    if getattr(node.target, "__name__", "") == PULLBACK:
        return {node}
    if node.target is not torch.autograd.grad:
        return set()
    given = dict(zip(("outputs", "inputs"), node.args, strict=False)) | node.kwargs
    outputs: list[fx.Node] = []
    inputs: set[fx.Node] = set()
    fx.map_arg(given["outputs"], outputs.append)
    fx.map_arg(given["inputs"], inputs.add)
    return {node} | set(walk(outputs, through=lambda n: n not in inputs)) - inputs


def _called(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a node is given to call, as a checkpoint is."""
    held = [getattr(gm, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    return [g for g in held if isinstance(g, fx.GraphModule)]
