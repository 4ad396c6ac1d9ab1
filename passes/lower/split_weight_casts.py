"""Split weight casts off a graph: what it computes of weights alone, which is the same until one of them is written.

    graph   %w, %x  →  quantize(%w), matmul with %x                    one run does it all
    casts   %w      →  payload, scale                                  runs when a weight was written
    rest    %w, %x, %payload, %scale  →  matmul                        runs each time

What is split off ends in a cast (`amax`, `scale`, `quantize`); views of it stay in the rest. A cast that a model
returns stays as well: who gets it may write into it. One that forward hands to backward does not (`mark_for_backward`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes.core.compilation import CASTS_ARE_KEPT, KEPT, TRAINED, VIEWS, aten, remove_dead, shows_memory
from fp8compile.passes.core.fusible import CONVERSIONS
from fp8compile.passes.core.node_views import Copy, first_input
from fp8compile.passes.core.walk import users_of, walk

CASTS = frozenset((ops.amax, ops.scale, ops.quantize))  # markers that depend on their inputs alone
MOVES = CASTS | VIEWS | {aten.cat.default, aten.clone.default, aten.reshape.default, aten.constant_pad_nd.default}


@dataclass(frozen=True)
class KeptValue:
    """A value that is computed of weights once. key: equal for values that are computed alike, in whatever graph.

    weights: positions of the weights among the inputs of the graph of casts.
    """

    key: str
    weights: tuple[int, ...]


@dataclass(frozen=True)
class WeightCasts:
    """The graph of casts. inputs: positions of its inputs among those of the whole graph; values: its results, which
    the rest takes behind its other inputs."""

    module: fx.GraphModule
    inputs: tuple[int, ...]
    values: tuple[KeptValue, ...]


def split_weight_casts(gm: fx.GraphModule) -> WeightCasts | None:
    """Take the casts of weights out of `gm`, which becomes the rest, and return them; None if it has none."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    constant = _constant(gm.graph)
    found = [node for node, is_cast in constant.items() if is_cast and _is_read_by_others(node, constant)]
    found = [node for node in found if not _escapes(node) and _inputs_of([node])]
    if not found:
        return None
    read = set(_inputs_of(found))
    weights = [n for n in placeholders if n in read]
    casts = _graph_of(gm, weights, found)
    values = _described(found, weights)
    _read_instead(gm.graph, placeholders[-1], found)
    gm.recompile()
    return WeightCasts(casts, tuple(map(placeholders.index, weights)), values)


def _constant(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Return the nodes that are computed of kept weights alone; True for those behind a cast, or a cast itself.

    A weight that is trained is moved and converted before its cast, and nothing else: arithmetic would be fused, and so
    rounded, otherwise than where it stands.
    """
    found: dict[fx.Node, bool] = {}
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        before = node.all_input_nodes
        if node.op == "placeholder":
            if node.meta.get(CASTS_ARE_KEPT) and not _is_written(node):
                found[node] = False
                if node.meta[CASTS_ARE_KEPT] == TRAINED:
                    trained.add(node)
        elif node.op == "call_function" and _is_repeatable(node) and all(i in found for i in before):
            is_trained = not trained.isdisjoint(before)
            if is_trained and node.target not in MOVES | CONVERSIONS and not all(found[i] for i in before):
                continue
            found[node] = node.target in CASTS or any(found[i] for i in before)
            if is_trained:
                trained.add(node)
    return found


def _is_written(node: fx.Node) -> bool:
    return any((copy := Copy.of(user)) is not None and copy.written is node for user in node.users)


def _is_repeatable(node: fx.Node) -> bool:
    """Return True if a node computes the same of the same inputs, and does nothing else."""
    if node.target in CASTS:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _is_read_by_others(node: fx.Node, constant: dict[fx.Node, bool]) -> bool:
    """Return True for what the rest reads, itself or a view of it. A view stays in the rest, with what it is of."""
    if shows_memory(node) and constant.get(first_input(node)):
        return False
    return any(user not in constant for user in _readers(node))


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Yield what reads a node or a view of it."""
    for seen in walk([node], users_of, through=lambda n: n is node or shows_memory(n)):
        if seen is not node and not shows_memory(seen):
            yield seen


def _escapes(node: fx.Node) -> bool:
    """Return True for what a model returns."""
    return not node.meta.get(KEPT) and any(reader.op == "output" for reader in _readers(node))


def _of_memory(node: fx.Node, casts: set[fx.Node]) -> fx.Node:
    """Return the cast that `node` is a view of, or is."""
    while shows_memory(node) and first_input(node) in casts:
        node = first_input(node)
    return node


def mark_for_backward(graph: fx.Graph) -> set[fx.Node]:
    """Mark the casts of weights in a joint graph, with what is computed of them alone, and return them.

    Backward reads them where they are kept. What is returned to the user, itself or a view of it, is not marked.
    """
    casts = {node for node, is_cast in _constant(graph).items() if is_cast}
    found = {node for node in casts if not _escapes(_of_memory(node, casts))}
    for node in found:
        node.meta[KEPT] = True
    return found


def _inputs_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the inputs of the graph that nodes are computed of."""
    return [n for n in walk(nodes) if n.op == "placeholder"]


def _graph_of(gm: fx.GraphModule, weights: list[fx.Node], found: list[fx.Node]) -> fx.GraphModule:
    """Return the graph that computes what was found."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = set(walk(found))
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in found))
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    return module


def _read_instead(graph: fx.Graph, last: fx.Node, found: list[fx.Node]) -> None:
    """Have the graph take what was found as inputs, behind `last`."""
    for node in found:
        with graph.inserting_after(last):
            last = graph.placeholder(f"{node.name}_kept")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
    remove_dead(graph)


def _described(found: list[fx.Node], weights: list[fx.Node]) -> tuple[KeptValue, ...]:
    """Return what the values are: keys of how they are computed, and of which weights.

    Arithmetic before a cast is rounded as the graph of casts is compiled: all that it computes is part of the key then.
    """
    digests = [_digest(node) for node in found]
    together = "".join(digest for digest, _, _ in digests)
    return tuple(
        KeptValue(digest if is_moved else _sha(digest + together), tuple(map(weights.index, read)))
        for digest, read, is_moved in digests
    )


def _digest(node: fx.Node) -> tuple[str, list[fx.Node], bool]:
    """Return a digest of how a value is computed, the weights in it, and whether they are moved and cast alone."""
    read: list[fx.Node] = []
    digests: dict[fx.Node, Digest] = {}

    def of(given: fx.Node) -> Digest:
        if given not in digests:
            if given.op == "placeholder":
                read.append(given)
                text = f"weight {len(read)}"
            else:
                text = f"{given.target}{fx.map_arg((given.args, given.kwargs), of)}"
            digests[given] = Digest(_sha(text))
        return digests[given]

    digest = of(node)
    return digest, read, all(n.op == "placeholder" or n.target in MOVES for n in digests)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Digest(str):
    """A digest that stands for a node among other arguments."""

    __repr__ = str.__str__
