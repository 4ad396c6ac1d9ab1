"""Save within a budget: what is kept for backward takes so many bytes, and no more time than it must.

    budget below what the cut keeps     matmuls and attention run again, those first that free most bytes a second
    budget above it                     values keep their precision, those made last first: no cast, no rounding
    option `offload`                    what the host can take in time comes on top of the budget (`save_on_host.py`)

The first is the same cut with other prices (Lagrange's: bytes + price · seconds), searched for by bisection. All layers
of a model are worth the same, so one price takes all or none of them; of those that lie between two prices, the first
in the order of the graph run again, as many as are needed. Places where one value is all that follows is computed from
(the residual stream between two layers) are borders that nothing runs across: else one layer would be computed from the
one before, and all of them would be in memory at once. The second drops forms instead; what is made last is read
first in backward, and adds least to the peak. Cheap operators run again whatever the budget: they are computed by the
kernel that needs them, and loading what they would leave costs more than that.

Source: Chen et al., arXiv 1604.06174 (recompute), and the knapsack of torch's activation_memory_budget, which
weighs operators one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from fp8compile.devices import Device
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.core.library_seconds import library_seconds
from fp8compile.passes.save.min_cut import Halves, Prices, may_be_computed_again, may_be_kept, plan_saved, saved_bytes
from fp8compile.passes.save.recompute_cost import find_far
from fp8compile.passes.save.save_on_host import Host
from fp8compile.passes.save.saved_forms import as_it_is, bytes_of, is_random, memory_of
from fp8compile.plan.reasons import Reason, Why

STEPS = 7  # of a bisection over prices: to a factor of two
ALLOWED = Why(Reason.BUDGET, "the budget allows it")
HIGHEST, LOWEST = 2.0**52, 2.0**20  # bytes that a second of a matmul may be worth; a GPU writes 2**42 in one
MOST = 64.0  # bytes that computing one byte again may be worth


@dataclass(frozen=True)
class Choice:
    """The values that are saved, how many bytes that is, and, where the budget cannot be met, why.

    moved: how many of the bytes the host's memory has to take.
    """

    saved: list[fx.Node]
    bytes: int
    missed: str = ""
    moved: int = 0


def plan_within(
    graph: fx.Graph, halves: Halves, budget: float | int | None, device: Device, host: Host | None = None
) -> Choice:
    """Return the values to save.

    budget: bytes, or a share (float) of what training keeps that computes nothing again and keeps everything as it is;
    None: no budget. Where it allows more precision, `halves.forms` says so afterwards. host: where what is beyond the
    budget may lie as well.
    """

    def cut(prices: Prices) -> Choice:
        saved = plan_saved(graph, halves, prices)
        return Choice(saved, saved_bytes(saved, halves))

    def usual() -> Choice:
        return _within_reach(graph, halves, cut)

    choice = usual()
    if budget is None:
        return choice
    limit = int(budget * _everything(graph, halves)) if isinstance(budget, float) else budget
    if choice.bytes <= limit:
        return _with_less_rounding(halves, usual, limit)
    if host is None:
        return _with_more_recompute(graph, halves, cut, choice, limit, device)
    taken = host.taken(choice.saved, halves)
    if choice.bytes <= limit + sum(taken.values()):
        return replace(choice, moved=choice.bytes - limit)

    def cut_beside(prices: Prices) -> Choice:
        saved = plan_saved(graph, halves, replace(prices, moved=taken.keys()))
        return Choice(saved, saved_bytes([n for n in saved if n not in taken], halves))

    staying = [n for n in choice.saved if n not in taken]
    beside = _with_more_recompute(graph, halves, cut_beside, replace(choice, saved=staying), limit, device)
    whole = saved_bytes(beside.saved, halves)
    if not beside.missed:
        return Choice(beside.saved, whole, moved=max(0, whole - limit))
    alone = _with_more_recompute(graph, halves, cut, choice, limit, device)
    if alone.bytes <= beside.bytes:
        return alone
    why = (
        f"the activation budget of {limit} bytes is below the {beside.bytes} that are neither moved nor computed again"
    )
    return Choice(beside.saved, whole, why, whole - beside.bytes)


def _within_reach(graph: fx.Graph, halves: Halves, cut: Callable[[Prices], Choice]) -> Choice:
    """Return the cut in which no value that is computed again is made of too much."""
    narrow: set[fx.Node] = set()
    while True:
        choice = cut(Prices(narrow=narrow))
        far = find_far(graph, choice.saved, halves) - narrow
        if not far:
            return choice
        narrow |= far


def _everything(graph: fx.Graph, halves: Halves) -> int:
    """Return the bytes that are kept where nothing runs again and nothing is rounded."""
    plain = Halves(halves.inputs, halves.forward, halves.backward, halves.static, halves.is_recomputable)
    return saved_bytes(plan_saved(graph, plain, Prices(byte=MOST)), plain)


def _with_less_rounding(halves: Halves, cut: Callable[[], Choice], limit: int) -> Choice:
    """Let as many values as fit keep their precision: what would be cast only to be saved, then what has a payload."""
    forms = dict(halves.forms)
    rounded = [n for n in reversed(forms) if forms[n].granularity is not None]
    order = list(dict.fromkeys(_origin(n) for n in sorted(rounded, key=lambda n: forms[n].payload is not None)))

    def unrounded(exact: set[fx.Node]) -> Choice:
        halves.forms.update(
            (node, as_it_is(value(node), ALLOWED)) if _origin(node) in exact else (node, forms[node])
            for node in rounded
        )
        return cut()

    everything = unrounded(set(order))
    if everything.bytes <= limit:
        return everything
    fits, too_many = 0, len(order)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if unrounded(set(order[:middle])).bytes <= limit else (fits, middle)
    choice, exact = unrounded(set(order[:fits])), set(order[:fits])
    room, more = limit - choice.bytes, dict[fx.Node, int]()
    for node in reversed(choice.saved):
        if node in forms and forms[node].granularity is not None and _origin(node) not in exact:
            more[_origin(node)] = more.get(_origin(node), 0) + bytes_of(value(node)) - forms[node].bytes
    for origin, bytes_ in more.items():  # what is too large for the rest of the budget lets smaller ones pass
        if bytes_ <= room:
            exact.add(origin)
            room -= bytes_
    filled = unrounded(exact)
    return filled if filled.bytes <= limit else unrounded(set(order[:fits]))


def _origin(node: fx.Node) -> fx.Node:
    """Return the node that computed the values of `node`, which may be a slice of a view of them."""
    origin = fusible.made_at(memory_of(node))
    return origin if origin is node else _origin(origin)


def _with_more_recompute(
    graph: fx.Graph, halves: Halves, cut: Callable[[Prices], Choice], usual: Choice, limit: int, device: Device
) -> Choice:
    seconds, narrow = _costly(graph, halves, device), _borders(graph, halves, set(usual.saved))
    least = cut(Prices(second=0.0, costly=seconds, narrow=narrow))
    if least.bytes > limit:
        why = f"the activation budget of {limit} bytes is below the {least.bytes} that cannot be computed again"
        return Choice(least.saved, least.bytes, why)
    low, high, choice = LOWEST, HIGHEST, least
    for _ in range(2 * STEPS):
        middle = math.sqrt(low * high)
        other = cut(Prices(second=middle, costly=seconds, narrow=narrow))
        if other.bytes <= limit:
            low, choice = middle, other
        else:
            high = middle
        if high < 2 * low:
            break
    return _first_ones(graph, cut, choice, limit, low, high, seconds, narrow)


def _first_ones(
    graph: fx.Graph,
    cut: Callable[[Prices], Choice],
    choice: Choice,
    limit: int,
    low: float,
    high: float,
    seconds: dict[fx.Node, float],
    narrow: frozenset[fx.Node],
) -> Choice:
    """Let only as many operators run again as are needed, of those that do at the lower price: the first ones."""
    ordered = [n for n in graph.nodes if n in seconds]
    fewest, most = 0, len(ordered)
    while most - fewest > 1:
        middle = (fewest + most) // 2
        allowed = {n: seconds[n] * (1.0 if i < middle else high / low) for i, n in enumerate(ordered)}
        other = cut(Prices(second=low, costly=allowed, narrow=narrow))
        if other.bytes <= limit:
            most, choice = middle, other
        else:
            fewest = middle
    return choice


def _borders(graph: fx.Graph, halves: Halves, saved: set[fx.Node]) -> frozenset[fx.Node]:
    """Return the narrow places between which four times their bytes would be saved: what lies between two of them runs
    again by itself."""
    narrow, found, between = set(narrow_places(graph, halves)), set[fx.Node](), 0
    for node in graph.nodes:
        size = saved_bytes([node], halves)
        if node in narrow and between >= 4 * size:
            found.add(node)
            between = 0
        elif node in saved:
            between += size
    return frozenset(found)


def narrow_places(graph: fx.Graph, halves: Halves) -> list[fx.Node]:
    """Return the values of the forward half that are, where they are computed, all that later ones are computed from.

    What cannot be kept (a checkpoint runs it again) is no such place. Nor are parameters, and what is computed of such
    alone.
    """
    nodes = [n for n in graph.nodes if n in halves.forward]
    place = {n: i for i, n in enumerate(nodes)}
    last = {n: max((place[u] for u in n.users if u in place), default=-1) for n in nodes}
    varying: set[fx.Node] = set()
    for node in nodes:
        if node in halves.inputs - halves.static or any(i in varying for i in node.all_input_nodes):
            varying.add(node)
    found, alive = [], set[fx.Node]()
    for i, node in enumerate(nodes):
        alive = {n for n in alive if last[n] > i}
        if node in varying and last[node] > i:
            alive.add(node)
        if alive == {node} and is_tensor(node) and node not in halves.inputs and may_be_kept(node, halves):
            found.append(node)
    return found


def _costly(graph: fx.Graph, halves: Halves, device: Device) -> dict[fx.Node, float]:
    """Return the matmuls, convolutions and attentions that may run again, and the seconds that each takes."""
    return {
        node: library_seconds(node, device)
        for node in graph.nodes
        if node not in halves.backward
        and fusible.is_library_kernel(node)
        and isinstance(node.target, torch._ops.OpOverload)
        and node not in halves.exact
        and not may_be_computed_again(node, halves.is_recomputable)
        and not is_random(node)
    }
