"""Plan saved: which values of the forward half are kept for the backward half, and which are computed again there.

A minimum cut of the joint graph. Every node that the forward half can compute is an edge, whose capacity is what it
costs to save its value; everything behind the cut is computed again from what is in front of it.

    source ─► x_in ──bytes──► x_out ─► y_in ──bytes──► y_out ─► … ─► sink (what only backward computes)
    source ──∞──────────────────────► y_in      y is never computed again: a matmul, attention, a random number
    source ──recompute cost─────────► y_in      y may be, but reads and writes memory

Parameters cost nothing: they are kept anyway. An FP8 payload costs its own bytes, half of what it was made of; that of
a weight is made again. Statistics of rows and amaxes are saved: they are small, and a transposed operand that had to
compute them again would need another kernel.

Source of the method: the min cut of torch's own partitioner (Chen et al., arXiv 1604.06174; He and Yu, 2023), which
does not know what a cast costs and would save payloads of everything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.passes import fusible
from fp8compile.passes.compilation import VIEWS, aten, is_tensor, value

RECOMPUTE = 1 / 64  # cost of computing a byte again, in bytes saved
UNKNOWN = 4096  # a size that only the data knows
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Halves:
    """What a partitioner knows of the joint graph before it cuts."""

    inputs: set[fx.Node]  # of the forward half
    forward: set[fx.Node]  # needed for the forward half's outputs
    backward: set[fx.Node]  # computed from incoming gradients, or returned by the backward half
    static: set[fx.Node]  # inputs that stay where they are: parameters
    is_recomputable: Callable[[fx.Node], bool]  # cheap and pure, by torch's own list


def plan_saved(graph: fx.Graph, halves: Halves) -> list[fx.Node]:
    """The values to save, in the order of the graph."""
    network = nx.DiGraph()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node in halves.backward and node not in halves.inputs:
            network.add_edge(_in(node), "sink", capacity=math.inf)
            continue
        _add(network, node, halves)
    if "sink" not in network or "source" not in network:
        return []
    _, (reachable, _) = nx.minimum_cut(network, "source", "sink")
    found = {name.removesuffix("_in") for name in reachable if name.endswith("_in")}
    cut = {name for name in found if f"{name}_out" not in reachable and f"{name}_out" in network}
    return [node for node in graph.nodes if node.name in cut]


def _add(network: nx.DiGraph, node: fx.Node, halves: Halves) -> None:
    if node in halves.inputs or not _may_be_computed_again(node, halves):
        network.add_edge("source", _in(node), capacity=math.inf)
    else:
        network.add_edge("source", _in(node), capacity=RECOMPUTE * _bytes(node))
    network.add_edge(_in(node), _out(node), capacity=_price(node, halves))
    if node in halves.backward:
        network.add_edge(_out(node), "sink", capacity=math.inf)
    for user in node.users:
        if user.op != "output":
            network.add_edge(_out(node), _in(user), capacity=math.inf)


def _in(node: fx.Node) -> str:
    return f"{node.name}_in"


def _out(node: fx.Node) -> str:
    return f"{node.name}_out"


def _may_be_computed_again(node: fx.Node, halves: Halves) -> bool:
    if node.op != "call_function":
        return False
    tag = node.meta.get("recompute")
    if tag in RECOMPUTED:
        return True
    if tag == CheckpointPolicy.MUST_SAVE or fusible.is_row_reduction(node) or fusible.is_col_sum(node):
        return False
    if node.target is operator.getitem:
        return _may_be_computed_again(node.args[0], halves)  # type: ignore[arg-type]
    if node.target in (ops.scale, ops.quantize, ops.dequantize, aten.cat.default):
        return True
    return node.target is not ops.amax and halves.is_recomputable(node)


def _price(node: fx.Node, halves: Halves) -> float:
    """What it costs to save the value of `node`; infinite for what cannot be."""
    if node.meta.get("recompute") in RECOMPUTED or not isinstance(
        node.meta.get("val"), (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return math.inf
    if node in halves.static:
        return 0.0
    return max(1.0, _bytes(node))


def _bytes(node: fx.Node) -> float:
    """Bytes of what `node` computes; 0 for a view, which computes nothing."""
    if not is_tensor(node):
        return 1.0
    if node.op == "call_function" and node.target in VIEWS:
        return max(1.0, _size(value(node)) * 1.0)
    return float(_size(value(node)))


def _size(x: torch.Tensor) -> int:
    n = x.dtype.itemsize
    for size in x.shape:
        n *= size if isinstance(size, int) else _hint(size)
    return n


def _hint(size: Any) -> int:
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN


def saved_bytes(nodes: Iterable[fx.Node], static: set[fx.Node]) -> int:
    """Bytes of the saved values that are not parameters."""
    return sum(_size(value(n)) for n in nodes if is_tensor(n) and n not in static)
