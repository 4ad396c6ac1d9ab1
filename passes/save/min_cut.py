"""Plan saved: which values of the forward half are kept for the backward half, and which are computed again there.

A minimum cut of the joint graph. Every node that the forward half can compute is an edge, whose capacity is what it
costs to save its value; everything behind the cut is computed again from what is in front of it.

    source ─► x_in ──bytes──► x_out ─► y_in ──bytes──► y_out ─► … ─► sink (what only backward computes)
    source ──∞──────────────────────► y_in      y is never computed again: a matmul, attention, a random number
    source ──recompute cost─────────► y_in      y may be, but reads and writes memory

A value costs the bytes of the form in which it would be kept (`passes/save/saved_forms.py`): an activation those of an
FP8 payload in groups. Parameters cost nothing: they are kept anyway. A payload that a matmul reads costs its own bytes;
that of a weight is made again. Statistics of rows and amaxes are saved: they are small, and a transposed operand that
had to compute them again would need another kernel.

Source of the method: the min cut of torch's own partitioner (Chen et al., arXiv 1604.06174; He and Yu, 2023), which
does not know what a cast costs and would save payloads of everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

import networkx as nx
import torch
from networkx.algorithms.flow import preflow_push
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import VIEWS, aten, in_recomputed_region, is_tensor, value
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.walk import walk
from fp8compile.passes.save.saved_forms import Form, bytes_of

NEVER = -1.0  # in place of the price of computing again: what only backward computes
RECOMPUTE = 1 / 64  # cost of computing a byte again, in bytes saved
NARROWING = {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default}


@dataclass(frozen=True)
class Halves:
    """The facts about the joint graph that a partitioner knows before it cuts."""

    inputs: set[fx.Node]  # of the forward half
    forward: set[fx.Node]  # needed for the forward half's outputs
    backward: set[fx.Node]  # computed from incoming gradients, or returned by the backward half
    static: set[fx.Node]  # what stays where it is, as it is: parameters, and casts of them that are kept
    is_recomputable: Callable[[fx.Node], bool]  # cheap and pure, by torch's own list
    forms: dict[fx.Node, Form] = field(default_factory=dict)  # how a value would be kept, where not as it is
    exact: set[fx.Node] = field(default_factory=set)  # what backward must not see rounded
    written: set[fx.Node] = field(default_factory=set)  # inputs that forward overwrites


@dataclass(frozen=True)
class Prices:
    """The costs of computing again, in bytes saved: of each byte of a cheap operator, each second of a costly one.

    costly: the matmuls and attentions that may run again at all, each with its seconds. narrow: what is not computed
    again even so. moved: what the host's memory takes, so that keeping it costs nothing.
    """

    byte: float = RECOMPUTE
    second: float = math.inf
    costly: Mapping[fx.Node, float] = field(default_factory=dict)
    narrow: Set[fx.Node] = frozenset()
    moved: Set[fx.Node] = frozenset()


def plan_saved(graph: fx.Graph, halves: Halves, prices: Prices | None = None) -> list[fx.Node]:
    """Return the values to save, in the order of the graph."""
    prices = prices or Prices()
    network, again = nx.DiGraph(), dict[fx.Node, float]()
    for node in reversed(graph.nodes):
        if node in halves.backward and node not in halves.inputs:
            again[node] = NEVER
        elif node in halves.backward or any(user in again for user in node.users):
            again[node] = _price_again(node, halves, prices)
            _add(network, node, halves, again, prices.moved)
    if "sink" not in network or "source" not in network:
        return []
    before = _before_the_cut(network)
    kept = [n for n in graph.nodes if again.get(n, NEVER) != NEVER and _in(n, again) in before]
    return [n for n in kept if _out(n) not in before]


def _before_the_cut(network: nx.DiGraph) -> set[str]:
    """Return what the source still reaches beside a maximum flow: of all minimum cuts the one nearest to the source.

    It keeps what a view or a conversion is taken of. (networkx's own partition is the one nearest to the sink.)
    """
    residual = preflow_push(network, "source", "sink")
    before, stack = {"source"}, ["source"]
    while stack:
        for name, edge in residual[stack.pop()].items():
            if name not in before and edge["flow"] < edge["capacity"]:
                before.add(name)
                stack.append(name)
    return before


def _add(
    network: nx.DiGraph, node: fx.Node, halves: Halves, again: Mapping[fx.Node, float], moved: Set[fx.Node]
) -> None:
    """Add the edges of a node of the forward half; `again`: of it and its users."""
    entrance = _in(node, again)
    if entrance != "source":
        network.add_edge("source", entrance, capacity=again[node])
    price = _price(node, halves)
    network.add_edge(entrance, _out(node), capacity=min(1.0, price) if node in moved else price)
    if node in halves.backward:
        network.add_edge(_out(node), "sink", capacity=math.inf)
    for user in node.users:
        if user in again and (entrance := _in(user, again)) != "source":
            network.add_edge(_out(node), entrance, capacity=math.inf)


def _price_again(node: fx.Node, halves: Halves, prices: Prices) -> float:
    """Return the price of computing `node` again; infinite for what cannot be."""
    if node in halves.inputs or node in prices.narrow:
        return math.inf
    if node in prices.costly:
        return prices.second * prices.costly[node]
    part = Getitem.of(node)
    if part is not None and part.source in prices.costly:
        return 0.0
    if not may_be_computed_again(node, halves.is_recomputable):
        return math.inf
    # views and conversions are done by whoever reads them
    free = node.op == "get_attr" or node.target in VIEWS or node.target in fusible.CONVERSIONS
    return 0.0 if free else prices.byte * _bytes(node)


def _in(node: fx.Node, again: Mapping[fx.Node, float]) -> str:
    """Return where `node` begins; what an infinite edge ties to an end of the network is that end."""
    return {math.inf: "source", NEVER: "sink"}.get(again[node], f"{node.name}_in")


def _out(node: fx.Node) -> str:
    return f"{node.name}_out"


def may_be_computed_again(node: fx.Node, is_recomputable: Callable[[fx.Node], bool]) -> bool:
    """Return True if backward may compute `node` again rather than keep it."""
    if node.op == "get_attr":  # the graph of a branch or a loop's body, which either half has
        return True
    if node.op != "call_function":
        return False
    if in_recomputed_region(node):
        return True
    if "unbacked_bindings" in node.meta:  # its size is a number of its own, which the other half would not know
        return False
    must_be_saved = node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE
    if must_be_saved or fusible.is_row_reduction(node) or fusible.is_col_sum(node):
        return False
    if (part := Getitem.of(node)) is not None:
        return may_be_computed_again(part.source, is_recomputable)
    if node.target in (ops.scale, ops.quantize, ops.grouped_cast, ops.dequantize, aten.cat.default):
        return True
    return node.target is not ops.amax and is_recomputable(node)


def _price(node: fx.Node, halves: Halves) -> float:
    """Return the price of saving the value of `node`; infinite for what cannot be."""
    if node.op == "placeholder" and is_object(node):
        return 0.0
    if node in halves.written:  # backward would find what forward has left there
        return math.inf
    if node in halves.static:
        return 0.0
    if in_recomputed_region(node) or not isinstance(
        node.meta.get("val"), (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return math.inf
    return max(1.0, bytes_kept(node, halves))


def may_be_kept(node: fx.Node, halves: Halves) -> bool:
    """Return True if `node` can be saved, at a price."""
    return 0 < _price(node, halves) < math.inf


def is_object(node: fx.Node) -> bool:
    """Return True if `node` is neither a tensor nor a number: the mesh of a distributed tensor."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def bytes_kept(node: fx.Node, halves: Halves) -> float:
    """Return the bytes of the form in which `node` is kept, and a little more of a wider dtype or a merged result.

    So of equal ones the narrower is kept, which is in memory anyway, and the slices that other kernels read.
    """
    form = halves.forms.get(node)
    if form is None or form.granularity is None:
        return _bytes(node)
    sliced = any(user.target in NARROWING for user in node.users)
    return form.bytes * (1 + 1e-4 * value(node).dtype.itemsize + (1e-3 if sliced else 0.0))


def _bytes(node: fx.Node) -> float:
    """Return the bytes of the value of `node` as it is."""
    return float(bytes_of(value(node))) if is_tensor(node) else 1.0


def run_again(graph: fx.Graph, saved: Iterable[fx.Node], halves: Halves) -> set[fx.Node]:
    """Return the nodes that backward computes again when it is given `saved`."""
    given = {*saved, *halves.inputs}

    def runs(node: fx.Node) -> bool:
        return node not in given and node not in halves.backward and node.op == "call_function"

    read = (i for n in graph.nodes if n in halves.backward for i in n.all_input_nodes)
    return set(filter(runs, walk(read, through=runs)))


def saved_bytes(nodes: Iterable[fx.Node], halves: Halves) -> int:
    """Return the bytes of the saved values that are not parameters, in the forms in which they are kept."""
    kept = [n for n in nodes if is_tensor(n) and n not in halves.static]
    return sum(halves.forms[n].bytes if n in halves.forms else bytes_of(value(n)) for n in kept)
