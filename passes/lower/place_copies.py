"""Place copies: those to the host's memory and back stand where they run beside kernels and free memory in time.

    to_host     behind the last node of forward that reads or writes what it copies
    copied      where, by the rates of the device, the copy has ended: from there on the memory is free
    to_device   so long before the first reader in backward that the copy has ended there
    copied      in front of that reader

One copy runs at a time each way. What forward has not copied by its end, it waits for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import fx

from fp8compile import host_copies
from fp8compile.devices import Device, describe
from fp8compile.passes.core.compilation import device_of, shows_memory, value
from fp8compile.passes.core.fusible import is_library_kernel
from fp8compile.passes.core.library_seconds import library_seconds
from fp8compile.passes.core.sizes import count
from fp8compile.passes.core.stages import HalfGraph

COPIES = (host_copies.to_host, host_copies.to_device, host_copies.copied)


def has_copies(c: HalfGraph) -> bool:
    """Return True if a half copies what is saved to the host, or back."""
    return any(n.target in COPIES for n in c.graph.nodes)


def run(c: HalfGraph) -> None:
    """Place the copies of a half."""
    place_copies(c.graph, describe(device_of(c.graph)))


def place_copies(graph: fx.Graph, device: Device) -> None:
    """Place the copies of `graph`, a forward or a backward half."""
    order = _Order(graph, device)
    _place_to_host(graph, order)
    _place_to_device(graph, order)


class _Order:
    """The nodes that compute, in order, and the seconds at which each begins; copies and what frames a graph left out.

    link: seconds a byte of a copy.
    """

    def __init__(self, graph: fx.Graph, device: Device) -> None:
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in COPIES]
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.begins = list(accumulate((_seconds(n, device) for n in self.nodes), initial=0.0))
        self.link = 1 / (device.host_link * 1e12)

    def first(self, nodes: Iterator[fx.Node]) -> int:
        """Return the place of the first of `nodes`; behind all if there is none."""
        return min((self.place[n] for n in nodes if n in self.place), default=len(self.nodes))

    def last(self, nodes: Iterator[fx.Node]) -> int:
        """Return the place of the last of `nodes`; -1 if there is none."""
        return max((self.place[n] for n in nodes if n in self.place), default=-1)


def _place_to_host(graph: fx.Graph, order: _Order) -> None:
    copies = graph.find_nodes(op="call_function", target=host_copies.to_host)
    ready = {copy: order.last(_touching(copy.args[0])) for copy in copies}
    free = 0.0
    moves: list[tuple[int, fx.Node]] = []
    for copy in sorted(copies, key=ready.__getitem__):
        free = max(free, order.begins[ready[copy] + 1]) + _bytes(copy) * order.link
        place = max(bisect_left(order.begins, free), ready[copy] + 1)
        moves += [(ready[copy] + 1, copy), *((place, user) for user in copy.users if user.target in COPIES)]
    _move(graph, order, moves)


def _place_to_device(graph: fx.Graph, order: _Order) -> None:
    copies = graph.find_nodes(op="call_function", target=host_copies.to_device)
    ends = {copy: next(iter(copy.users)) for copy in copies}
    needed = {copy: order.first(iter(ends[copy].users)) for copy in copies}
    free = float("inf")
    moves: list[tuple[int, fx.Node]] = []
    for copy in sorted(copies, key=needed.__getitem__, reverse=True):
        free = min(free, order.begins[needed[copy]]) - _bytes(copy) * order.link
        place = max(0, min(bisect_right(order.begins, free) - 1, needed[copy]))
        moves += [(place, copy), (needed[copy], ends[copy])]
    _move(graph, order, moves)


def _move(graph: fx.Graph, order: _Order, moves: list[tuple[int, fx.Node]]) -> None:
    """Move each node in front of the node at its place: of several, a copy before it is waited for."""
    for place, node in sorted(moves, key=lambda m: (m[0], m[1].target is host_copies.copied)):
        (order.nodes[place] if place < len(order.nodes) else graph.output_node()).prepend(node)


def _touching(x: fx.Node) -> Iterator[fx.Node]:
    """Yield `x`, and every node that reads or writes its memory, through views."""
    while shows_memory(x):
        x = x.all_input_nodes[0]
    found, open_ = {x}, [x]
    yield x
    while open_:
        for user in open_.pop().users:
            if user in found:
                continue
            found.add(user)
            yield user
            if shows_memory(user):
                open_.append(user)


def _bytes(copy: fx.Node) -> int:
    x = value(copy)
    return count(x.shape) * x.dtype.itemsize


def _seconds(node: fx.Node, device: Device) -> float:
    if is_library_kernel(node) and isinstance(node.target, torch._ops.OpOverload):
        return library_seconds(node, device)
    return 0.0
