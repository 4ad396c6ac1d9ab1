"""Recompute cost: find values whose recomputation would read so much that keeping them is better.

    x1 = x0 + g1 * a1      x2 = x1 + g2 * a2      …      x24 = x23 + g24 * a24

Where backward needs each a anyway (for the gradient of its gate g), the minimum cut sees x24 for nothing: it is the sum
of what is kept. Every layer's backward would compute its x from the first one on, so layer n would read n tensors, and
a model of n layers n² of them. Nor would a cut see it with other prices: it pays for a node once, however many kernels
compute it. So what reads more than `MOST` times what keeping it would take is kept, and is where the next reach begins.
(Payloads are left out: half the bytes of what they are made of, they would be kept in place of that.)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes.core.compilation import VIEWS, is_tensor, value
from fp8compile.passes.core.marker_views import GroupedPart
from fp8compile.passes.save.min_cut import NARROWING, Halves, bytes_kept, may_be_kept, run_again
from fp8compile.passes.save.saved_forms import count

MOST = 4.0  # a gated activation function reads two or three


def find_far(graph: fx.Graph, saved: Iterable[fx.Node], halves: Halves) -> set[fx.Node]:
    """Return the values that backward would compute again out of too much, if it were given `saved`."""
    given = {*saved, *halves.inputs}
    again = run_again(graph, saved, halves)
    reads: dict[fx.Node, dict[fx.Node, float]] = {}
    far = set()
    for node in graph.nodes:
        if node not in again:
            continue
        reads[node] = {}
        for source in node.all_input_nodes:
            found = reads.get(source, {})
            if source in given and source not in halves.static and is_tensor(source):
                found = {source: bytes_kept(source, halves)}
            share = _share(node, source)
            for leaf, bytes_ in found.items():
                reads[node][leaf] = max(reads[node].get(leaf, 0.0), bytes_ * share)
        is_payload = node.target is ops.quantize or GroupedPart.of(node) is not None
        if len(reads[node]) > 1 and not is_payload and may_be_kept(node, halves):
            kept = bytes_kept(node, halves)
            if sum(reads[node].values()) > MOST * kept:
                far.add(node)
                reads[node] = {node: kept}
    return far


def _share(node: fx.Node, source: fx.Node) -> float:
    """Return the share of `source` that a view, a slice or a part of it shows."""
    if node.target is operator.getitem or node.target in VIEWS or node.target in NARROWING:
        shown, whole = _elements(node), _elements(source)
        return min(1.0, shown / whole) if shown and whole else 1.0
    return 1.0


def _elements(node: fx.Node) -> int:
    """Return the elements of a tensor, or of the parts that it was split into; 0 for anything else."""
    parts = value(node) if isinstance(value(node), (tuple, list)) else [value(node)]
    return sum(count(part.shape) for part in parts if isinstance(part, torch.Tensor))
