"""Nested regions: modules under `torch.compiler.nested_compile_region`, of which one graph serves several layers.

A Dynamo graph calls a region like a function. AOTAutograd hands the region's joint graph to passes and partitioner by
itself, before the graph that calls it, and no longer says which of its inputs are parameters. That is found again by
what it is called with: of regions with inputs of equal types an input is a parameter where it is one in every call.

A region is one more graph of the plan, counted once. Amaxes and column sums are put together for each graph. Bodies of
branches and loops (`torch.cond`) are compiled as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph  # what Dynamo makes of a nested region

from fp8compile.passes.core.compilation import Input

HELD = "fp8_held"  # of an input of a region's graph: a parameter, which need not be saved for backward
UNKNOWN = Input(is_parameter=False)

Types = tuple[tuple[str, str], ...]  # dtype and shape of each input


def inputs_of_regions(gm: fx.GraphModule, inputs: Sequence[Input]) -> dict[Types, tuple[Input, ...]]:
    """Return what is known of the inputs of the regions that a Dynamo graph calls; `inputs`: of the graph itself."""
    known = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
    found: dict[Types, tuple[Input, ...]] = {}
    for call in gm.graph.find_nodes(op="call_function", target=invoke_subgraph):
        given = [a for a in call.args[2:] if isinstance(a, fx.Node)]
        mine = tuple(known.get(a, UNKNOWN) for a in given)
        types = _types(a.meta.get("example_value") for a in given)
        found[types] = tuple(map(_both, mine, found.get(types, mine)))
    return found


def match_inputs(graph: fx.Graph, regions: Mapping[Types, Sequence[Input]]) -> dict[str, Input]:
    """Return the inputs of the joint or inference graph of a region, by name; mark its parameters `HELD`."""
    placeholders = [n for n in graph.find_nodes(op="placeholder") if "tangents" not in str(n.target)]
    known = regions.get(_types(n.meta.get("val") for n in placeholders), ())
    for node, given in zip(placeholders, known, strict=False):
        node.meta[HELD] = given.is_parameter
    return {node.name: given for node, given in zip(placeholders, known, strict=False)}


def bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graphs that a graph calls (of regions, branches and loops), each once, innermost first, `gm` last."""
    found: list[fx.GraphModule] = []
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, fx.GraphModule):
            found += [inner for inner in bodies(body) if inner not in found]
    return [*found, gm]


def _both(a: Input, b: Input) -> Input:
    return a if (a.is_parameter, a.is_buffer) == (b.is_parameter, b.is_buffer) else UNKNOWN


def _types(values: Any) -> Types:
    return tuple(
        (str(v.dtype), str(tuple(v.shape))) if isinstance(v, torch.Tensor) else (type(v).__name__, "") for v in values
    )
