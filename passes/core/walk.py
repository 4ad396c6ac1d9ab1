"""Walk a graph: along inputs or users, as far as a condition allows, every node once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx

Neighbours = Callable[[fx.Node], Iterable[fx.Node]]


def inputs_of(node: fx.Node) -> Iterable[fx.Node]:
    """Return the nodes that `node` reads."""
    return node.all_input_nodes


def users_of(node: fx.Node) -> Iterable[fx.Node]:
    """Return the nodes that read `node`."""
    return node.users


def walk(
    starts: Iterable[fx.Node], neighbours: Neighbours = inputs_of, through: Callable[[fx.Node], bool] = lambda _: True
) -> Iterator[fx.Node]:
    """Yield `starts` and everything that is reached from them, each node once, depth first.

    neighbours: where to go on from a node (`inputs_of`, `users_of`, or another). through: a node for which it is False
    is yielded, but nothing behind it is.
    """
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        if through(node):
            fresh = [n for n in neighbours(node) if n not in seen]
            seen.update(fresh)
            stack += dict.fromkeys(fresh)
