"""A graph as it was: put aside before passes run, and put back when one fails.

Passes seldom fail, so putting aside is cheap: a snapshot holds what each node says (arguments are immutable), and
builds nodes only when it is asked for the graph.
"""

from __future__ import annotations

from torch import fx


class Snapshot:
    """A copy of `graph` as it is now, whatever becomes of it."""

    def __init__(self, graph: fx.Graph):
        self._owner, self._codegen = graph.owning_module, graph._codegen
        self._nodes = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in graph.nodes]

    def graph(self) -> fx.Graph:
        """Return a graph with the same names, metadata and code generator."""
        graph = fx.Graph(self._owner)
        copies: dict[fx.Node, fx.Node] = {}
        for node, op, target, args, kwargs, name, kind, meta in self._nodes:
            args, kwargs = fx.map_arg((args, kwargs), copies.__getitem__)
            copies[node] = graph.create_node(op, target, args, kwargs, name, kind)
            copies[node].meta = dict(meta)
        graph._codegen = self._codegen
        return graph


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the same names, metadata and code generator."""
    return Snapshot(graph).graph()


def restore_graph(graph: fx.Graph, backup: fx.Graph) -> None:
    """Make `graph` what it was; it must stay the same object."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph.output(graph.graph_copy(backup, {}))
    graph.output_node().meta = dict(backup.output_node().meta)
