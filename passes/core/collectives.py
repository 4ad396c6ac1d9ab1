"""Collectives: tensors that travel between ranks, what shows them where they arrive, and another tensor sent alike.

    %g = all_gather(%x)   %w = wait_tensor(%g)   %p = split(%w)   %y = cat([%p[0], %p[1]], 1)   %v = view(%y)
         the collective        arrives                steps: the same rows, in another order

A step keeps rows (along the last dimension) whole. So whatever has a value for each row of %x, a payload or an amax,
travels in the same way, and lies where it arrives as the rows of %v do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.aten_views import Concatenation, Permutation
from fp8compile.passes.core.compilation import Compilation, aten, getitems, value
from fp8compile.passes.core.node_views import argument, call_of, first_input
from fp8compile.passes.core.sizes import same_sizes

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
NAMES: dict[Any, str] = {ALL_GATHER: "all-gather", ALL_TO_ALL: "all-to-all"}
VIEWS = (aten.view.default, aten._unsafe_view.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
AS_BYTES = aten.view.dtype
CARRIERS = {ALL_GATHER, ALL_TO_ALL, WAIT, AS_BYTES, operator.getitem, *SPLITS, aten.index.Tensor}


@dataclass
class Journey:
    """A tensor `source` that a collective moves. `steps`: what rearranges it where it arrives, in graph order."""

    source: fx.Node
    collective: fx.Node
    arrival: fx.Node
    steps: list[fx.Node] = field(default_factory=list)

    @property
    def whole(self) -> set[fx.Node]:
        """The nodes that show every row once."""
        parts: set[fx.Node] = set()
        for node in self.steps:
            of_parts = node.target is not aten.cat.default and parts.intersection(node.all_input_nodes)
            if of_parts or node.target in (*SPLITS, operator.getitem, aten.index.Tensor):
                parts.add(node)
        return {self.arrival, *self.steps} - parts

    def readers(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (what is read, who reads it), for all that computes with what arrived."""
        steps = {*self.steps}
        for node in (self.arrival, *self.steps):
            yield from ((node, user) for user in node.users if user not in steps)


def journeys(graph: fx.Graph, target: Any) -> list[Journey]:
    """Return all tensors that collectives of this kind move."""
    found = []
    for node in graph.find_nodes(op="call_function", target=target):
        if len(node.users) == 1 and next(iter(node.users)).target is WAIT:
            journey = Journey(first_input(node), node, next(iter(node.users)))
            journey.steps = _steps(graph, journey.arrival)
            found.append(journey)
    return found


def _steps(graph: fx.Graph, arrival: fx.Node) -> list[fx.Node]:
    """Return the nodes behind `arrival` that show its rows in another order."""
    found = [arrival]
    seen = {arrival}
    for node in graph.nodes:
        if node.op == "call_function" and (data := _data(node)) and seen.issuperset(data) and _keeps_rows(node):
            seen.add(node)
            found.append(node)
    return found[1:]


def _data(node: fx.Node) -> list[fx.Node]:
    """Return what a step rearranges; its other arguments are sizes and indices."""
    known = (*VIEWS, *SPLITS, operator.getitem, aten.permute.default, aten.clone.default, aten.index.Tensor)
    if cat := Concatenation.of(node):
        return cat.pieces
    return [first_input(node)] if node.target in known else []


def _keeps_rows(node: fx.Node) -> bool:
    """Return True if a step leaves every row whole, and shows every row (a split: its pieces together)."""
    source = _data(node)[0]
    if node.target is operator.getitem:
        return source.target in SPLITS
    rank = value(source).dim() if source.target not in SPLITS else 0
    if node.target in VIEWS:
        return value(node).dim() > 1 and rank > 1 and same_sizes(value(node).shape[-1:], value(source).shape[-1:])
    if node.target is aten.permute.default:
        return Permutation(node).dims[-1] == rank - 1
    if node.target in SPLITS:
        return argument(node, "dim") % rank != rank - 1
    if node.target is aten.cat.default:
        return argument(node, "dim") % rank != rank - 1 and _joins_a_split(node)
    if node.target is aten.index.Tensor:
        indices = argument(node, "indices")
        return rank == 2 and len(indices) == 1 and value(indices[0]).dim() == 1 and not _is_mask(indices[0])
    return node.target is aten.clone.default


def _joins_a_split(cat: fx.Node) -> bool:
    """Return True if `cat` has each piece of one split once."""
    pieces = _data(cat)
    split = pieces[0].all_input_nodes[0]
    if split.target not in SPLITS or len(set(pieces)) != len(pieces):
        return False
    return {*getitems(split).values()} == {*pieces} and len(pieces) == len(split.meta["val"])


def _is_mask(node: fx.Node) -> bool:
    return value(node).dtype == torch.bool


@dataclass
class Sent:
    """Another tensor with a row for each row of what a journey moves, sent in the same way."""

    c: Compilation
    journey: Journey
    source: fx.Node
    like: fx.Node
    shown: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what shows the journey's -> what shows this one's

    def at(self, node: fx.Node) -> fx.Node:
        """Return what shows it as `node` shows what the journey moves."""
        if not self.shown:
            origin, c = self.journey.collective, self.c
            moved = c.emit(call_of(origin), self.source, *origin.args[1:], like=self.like)
            self.shown[self.journey.arrival] = c.emit(WAIT, moved, like=self.like)
        if node not in self.shown:
            self.shown[node] = self._step(node)
        return self.shown[node]

    def _step(self, node: fx.Node) -> fx.Node:
        sources = [self.at(source) for source in _data(node)]
        args: list[Any] = [sources if node.target is aten.cat.default else sources[0], *node.args[1:]]
        if node.target in VIEWS:
            args[1] = [*argument(node, "size")[:-1], value(sources[0]).shape[-1]]
        copied = node.target is aten.clone.default
        return self.c.emit(call_of(node), *args, like=self.like, contiguous=copied)


def erase(c: Compilation, journey: Journey) -> None:
    """Remove a journey that nobody reads any more: dead code elimination takes a wait for an effect."""
    for node in (*reversed(journey.steps), journey.arrival, journey.collective):
        if not node.users:
            c.graph.erase_node(node)


def is_sent(node: fx.Node) -> bool:
    """Return True if `node` shows bytes that came from other ranks: a payload on its way."""
    while node.target in (CARRIERS | {aten.cat.default, aten.clone.default, aten.permute.default, *VIEWS}):
        if node.target in NAMES:
            return value(node).dtype == torch.uint8
        node = node.all_input_nodes[0]
    return False
