"""A graph as it was: put aside before passes run, and put back when one fails.

Passes seldom fail, so putting aside is cheap: a snapshot holds what each node says (arguments are immutable), and
builds nodes only when it is asked for the graph.
"""

from __future__ import annotations

from torch import fx

SOURCE = "_dynamo_source"  # of an input of Dynamo's graph: where it comes from, which AOTAutograd asks for


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
            if hasattr(node, SOURCE):
                setattr(copies[node], SOURCE, getattr(node, SOURCE))
        graph._codegen = self._codegen
        return graph


class ModuleSnapshot:
    """A copy of what passes change of Dynamo's module: its graph, the graphs that it calls, and its buffers."""

    def __init__(self, gm: fx.GraphModule):
        self._gm, self._buffers = gm, dict(gm._buffers)
        self._graphs = [(m, Snapshot(m.graph)) for m in gm.modules() if isinstance(m, fx.GraphModule)]

    def restore(self) -> None:
        """Make the module what it was; its graphs are new ones."""
        for module, snapshot in self._graphs:
            module.graph = snapshot.graph()  # which compiles it again, too
        self._gm._buffers.clear()
        self._gm._buffers.update(self._buffers)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the same names, metadata and code generator."""
    return Snapshot(graph).graph()


def restore_graph(graph: fx.Graph, backup: fx.Graph) -> None:
    """Make `graph` what it was; it must stay the same object. What failed may have left nodes behind their users."""
    for node in graph.nodes:
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    graph.output(graph.graph_copy(backup, {}))
    graph.output_node().meta = dict(backup.output_node().meta)
