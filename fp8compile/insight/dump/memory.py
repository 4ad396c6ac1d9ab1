"""Memory over time, from the graphs alone: the bytes of the values that are alive after each node.

A value lives from the node that computes it to its last reader; a view lives in what it is a view of. Parameters and
other inputs that stay where they are cost nothing here. A loss in chunks also has a chunk of logits while it runs. No
fusion is taken into account: what Inductor never writes to
memory counts as if it did, in the same way for every graph, so that differences mean more than heights.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.kernels.loss.chunked_loss import workspace
from fp8compile.passes.core.compilation import base, value
from fp8compile.passes.core.node_views import argument, node_argument


@dataclass(frozen=True)
class Timeline:
    """alive[i]: bytes after node names[i]. start: what the graph is given (tensors that the other half saved)."""

    start: int
    names: tuple[str, ...]
    alive: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max((self.start, *self.alive))

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as plain data."""
        return {**asdict(self), "peak": self.peak}


def timeline(graph: fx.Graph, static: Collection[str] = ()) -> Timeline:
    """Return the `Timeline` of a forward or backward graph; `static` names placeholders that cost nothing."""
    nodes = list(graph.nodes)
    last = {n: i for i, n in enumerate(nodes)}
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[base(used)] = max(last[base(used)], i)
    dying: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        dying.setdefault(i, []).append(node)
    held = {n for n in nodes if n.op == "placeholder" and n.name not in static}
    current = start = sum(map(size_of, held))
    names, alive = [], []
    for i, node in enumerate(nodes):
        if node.op == "call_function":
            current += 0 if base(node) is not node else size_of(node)
            held.add(node)
            names.append(node.name)
            alive.append(current + _workspace(node))
        current -= sum(size_of(n) for n in dying.get(i, []) if n in held and base(n) is n)
    return Timeline(start, tuple(names), tuple(alive))


def _workspace(node: fx.Node) -> int:
    """Return the bytes that `node` has beside its results while it runs."""
    if node.target not in ops.CHUNKED_LOSSES:
        return 0
    is_fp8 = node.target is ops.chunked_loss_in_fp8
    x, rows = node_argument(node, "x"), argument(node, "rows")
    classes = argument(node, "classes") if is_fp8 else value(node_argument(node, "weight")).shape[0]
    results: list[torch.Tensor] = node.meta["val"]  # which are nodes of their own only after it
    m, k = map(_number, value(x).shape)
    waits = is_fp8 and argument(node, "waits")
    chunk = workspace(rows, _number(classes), m, k, value(x).dtype, is_fp8, waits)
    return chunk + sum(math.prod(map(_number, v.shape)) * v.dtype.itemsize for v in results)


def size_of(node: fx.Node) -> int:
    """Return the bytes of what `node` computes; 0 for no tensor, and for tuples, whose elements count themselves."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return 0
    count = val.dtype.itemsize
    for size in val.shape:
        count *= _number(size)
    return count


def _number(size: Any) -> int:
    try:
        return size if isinstance(size, int) else int(size.node.hint)
    except (AttributeError, TypeError, ValueError):
        return 0
