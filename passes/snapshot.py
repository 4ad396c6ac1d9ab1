"""A graph as it was: put aside before passes run, and put back when one fails."""

from __future__ import annotations

from torch import fx


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names, metadata and code generator."""
    copy = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, env)
    output = graph.output_node()
    copy.output(result, output.type)
    copy.output_node().meta = dict(output.meta)
    copy._codegen = graph._codegen
    return copy


def restore_graph(graph: fx.Graph, backup: fx.Graph) -> None:
    """Make `graph` what it was; it must stay the same object."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph.output(graph.graph_copy(backup, {}))
    graph.output_node().meta = dict(backup.output_node().meta)
