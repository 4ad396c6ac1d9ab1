"""Where to draw the nodes of a graph: layers by depth, each node near its neighbours.

Reads the text of a stage (`passes/core/graph_text.py`), so that a dump alone is enough. Views and tuple elements are
left
out: an edge goes on to what they show. Inputs stand one layer before their first reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import networkx as nx

from fp8compile.passes.core import operators

LINE = re.compile(r"^%(?P<name>\S+): (?P<type>.*?) = (?P<op>[^(\[]+)(?P<rest>.*)$")
VIEWS = ("view", "_unsafe_view", "permute", "t", "transpose", "squeeze", "unsqueeze", "expand", "alias", "detach")
MATMULS = ("mm", "addmm", "bmm", "_grouped_mm", "convolution", "convolution_backward")
ATTENTIONS = {name.removeprefix("aten::").replace("::", ".") for name in operators.ATTENTIONS}
LIMIT = 1500  # nodes that are drawn: the first ones of a longer graph


def drawing(text: str) -> dict[str, Any]:
    """Return nodes with their places, and edges as pairs of indices; `left_out` nodes did not fit."""
    graph, left_out = parse(text)
    depth = _layers(graph)
    columns = _columns(graph, depth)
    nodes = [
        {"name": n, "op": graph.nodes[n]["op"], "type": graph.nodes[n]["type"], "kind": kind(graph.nodes[n]["op"]),
         "x": columns[n], "y": depth[n]}
        for n in graph
    ]  # fmt: skip
    index = {n: i for i, n in enumerate(graph)}
    return {"nodes": nodes, "edges": [[index[a], index[b]] for a, b in graph.edges], "left_out": left_out}


def parse(text: str) -> tuple[nx.DiGraph, int]:
    """Return the graph in a stage's text, without views; how many nodes were left out."""
    graph = nx.DiGraph()
    shown: dict[str, str] = {}  # a view -> what it shows
    left_out = 0
    for line in text.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        name, op = str(match["name"]), match["op"].strip()
        used = [shown.get(r, r) for r in re.findall(r"%([\w.]+)", match["op"] + match["rest"])]
        if used and (op.split(".")[0] in VIEWS or op.startswith("%")):
            shown[name] = str(used[0])
        elif len(graph) >= LIMIT:
            left_out += 1
        else:
            graph.add_node(name, op=op, type=match["type"])
            graph.add_edges_from((u, name) for u in dict.fromkeys(used) if u in graph)
    return graph, left_out


def kind(op: str) -> str:
    """Return the colour of a node: matmul, fp8 matmul, cast, region, input, other."""
    if op == "fp8.scaled_mm":
        return "fp8"
    if op in MATMULS or op in ATTENTIONS:
        return "matmul"
    if op == "fp8.region" or op.startswith("triton_kernel"):
        return "region"
    if op.startswith("fp8."):
        return "cast"
    return "input" if op in ("placeholder", "get_attr") else "other"


def _layers(graph: nx.DiGraph) -> dict[str, int]:
    depth = {n: i for i, layer in enumerate(nx.topological_generations(graph)) for n in layer}
    for n in graph:
        if graph.in_degree(n) == 0 and graph.out_degree(n):
            depth[n] = min(depth[s] for s in graph.successors(n)) - 1
    return depth


def _columns(graph: nx.DiGraph, depth: dict[str, int]) -> dict[str, float]:
    """Return places within the layers: sorted by the mean place of neighbours, down and up a few times."""
    layers: dict[int, list[str]] = {}
    for n in graph:
        layers.setdefault(depth[n], []).append(n)
    place = {n: i - len(layer) / 2 for layer in layers.values() for i, n in enumerate(layer)}
    for sweep in range(6):
        down = sweep % 2 == 0
        for d in sorted(layers, reverse=not down):
            wanted = {n: _mean((graph.predecessors if down else graph.successors)(n), place, n) for n in layers[d]}
            layers[d].sort(key=wanted.__getitem__)
            place.update(zip(layers[d], _spread([wanted[n] for n in layers[d]]), strict=True))
    return {n: round(x, 2) for n, x in place.items()}


def _mean(neighbours: Iterable[str], place: dict[str, float], own: str) -> float:
    found = [place[n] for n in neighbours]
    return sum(found) / len(found) if found else place[own]


def _spread(wanted: list[float]) -> list[float]:
    """Return places at least 1 apart, in order, near the wanted ones."""
    places: list[float] = []
    for x in wanted:
        places.append(max(x, places[-1] + 1) if places else x)
    shift = sum(wanted) / len(wanted) - sum(places) / len(places)
    return [x + shift for x in places]
