"""Walking graphs, and reading arguments by name: against networkx, and against what was written into a graph."""

from __future__ import annotations

import random

import networkx as nx
import pytest
import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes.core.marker_views import Quantize, Scale, ScaledMM
from fp8compile.passes.core.node_views import argument
from fp8compile.passes.core.walk import users_of, walk

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(10))
def test_a_walk_reaches_what_networkx_reaches(seed):
    rng, graph = random.Random(seed), fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(40):
        nodes.append(graph.call_function(torch.add, (rng.choice(nodes), rng.choice(nodes))))
    edges = nx.DiGraph([(i, n) for n in nodes for i in n.all_input_nodes])
    for node in rng.sample(nodes[1:], 8):
        found = list(walk([node]))
        assert found[0] is node
        assert len(found) == len(set(found))
        assert set(found) == nx.ancestors(edges, node) | {node}
        behind = nx.descendants(edges, node) if node in edges else set()
        assert set(walk([node], users_of)) == behind | {node}
        stop = rng.choice(found)
        kept = edges.copy()
        kept.remove_edges_from([(i, stop) for i in stop.all_input_nodes])
        assert set(walk([node], through=lambda n, stop=stop: n is not stop)) == nx.ancestors(kept, node) | {node}


def test_arguments_are_read_by_name_however_they_were_given():
    graph = fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    by_place = graph.call_function(ops.quantize, (x, scale, "e4m3", "row", True))
    by_name = graph.call_function(ops.quantize, (x,), {"scale": scale, "format": "e4m3", "granularity": "row"})
    for node, transposed in ((by_place, True), (by_name, False)):
        cast = Quantize.of(node)
        assert cast is not None
        assert (cast.x, cast.scale, cast.format, cast.granularity) == (x, scale, "e4m3", "row")
        assert cast.transpose is transposed
        assert cast.multiples == (1, 1)
    assert Scale.of(by_place) is None
    assert ScaledMM.of(x) is None
    with pytest.raises(KeyError):
        argument(by_place, "no such")
    assert argument(graph.call_function(aten.sum.dim_IntList, (x, [0])), "keepdim") is False
