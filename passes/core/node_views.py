"""Read the arguments of a node by their names in its operator's schema, with the types that they have.

`argument(node, "dim")` gives an argument of any operator with a schema, whether it was given by position, by name, or
not at all. `NodeView` is the base of typed views of one kind of node; those of markers are in `marker_views.py`, those
of aten in `aten_views.py` and `matmul_views.py`.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import fx

aten = torch.ops.aten


@functools.cache
def _schema_of(target: Any) -> dict[str, tuple[int, Any]]:
    """Return position and default of each argument of an operator, by name."""
    arguments = enumerate(target._schema.arguments)
    return {a.name: (i, a.default_value if a.has_default_value() else None) for i, a in arguments}


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument `name` of a call of an operator; raise KeyError where its schema has none of that name."""
    position, default = _schema_of(node.target)[name]
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def node_argument(node: fx.Node, name: str) -> fx.Node:
    """Return the argument `name`, which is a node."""
    found = argument(node, name)
    assert isinstance(found, fx.Node), f"{name} of {node.format_node()} is no node"
    return found


def set_argument(node: fx.Node, name: str, new: Any) -> None:
    """Give a call of an operator `new` as its argument `name`, by position where that was given so, and else by
    name."""
    position, _ = _schema_of(node.target)[name]
    if position < len(node.args):
        node.update_arg(position, new)
    else:
        node.update_kwarg(name, new)


def first_input(node: fx.Node) -> fx.Node:
    """Return the first argument, which is a node: the tensor that a pointwise operator, a view or a cast reads."""
    found = node.args[0]
    assert isinstance(found, fx.Node), f"the first argument of {node.format_node()} is no node"
    return found


@dataclass(frozen=True)
class NodeView:
    """A call of one of `TARGETS`."""

    node: fx.Node
    TARGETS: ClassVar[frozenset[Any]] = frozenset()

    @classmethod
    def of(cls, node: object) -> Self | None:
        """Return the view of `node`, or None if it is no call of these operators."""
        return cls(node) if isinstance(node, fx.Node) and node.target in cls.TARGETS else None

    def _node(self, name: str) -> fx.Node:
        return node_argument(self.node, name)

    def _optional(self, name: str) -> fx.Node | None:
        return cast("fx.Node | None", argument(self.node, name))

    def _text(self, name: str) -> str:
        return cast(str, argument(self.node, name))


class Getitem(NodeView):
    """One result out of a tuple."""

    TARGETS = frozenset({operator.getitem})

    @property
    def source(self) -> fx.Node:
        """The node that gives the tuple."""
        return first_input(self.node)

    @property
    def index(self) -> int:
        """The position in the tuple."""
        return cast(int, self.node.args[1])


class Copy(NodeView):
    """`copy_`: a tensor written into another."""

    TARGETS = frozenset({aten.copy_.default})

    @property
    def written(self) -> fx.Node:
        """The tensor that is written to."""
        return first_input(self.node)

    @property
    def source(self) -> fx.Node:
        """The tensor that is read."""
        return self._node("src")


def call_of(node: fx.Node) -> Any:
    """Return what a node calls."""
    assert callable(node.target), f"{node.format_node()} is no call of a function"
    return node.target
