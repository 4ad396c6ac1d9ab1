"""Label indexing: labels that index classes, row by row, become a gather's, which a loss in chunks knows.

Before      %c = index(%x, [iota(R), %y])                  index_put(zeros [R, N], [iota(R), %y], %g, True)
After       %i = unsqueeze(where(%y < 0, %y + N, %y), 1)
            %c = squeeze(gather(%x, 1, %i), 1)             scatter_add(zeros, 1, %i, unsqueeze(%g, 1))

As users write it: log_probabilities[torch.arange(R), labels]. Sound because the numbers from 0 to R − 1 are every row
once; an index below zero counts from the end, which a gather's does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.passes.core.node_views import argument, first_input, node_argument
from fp8compile.passes.core.replace import replace_value

prims = torch.ops.prims


def gather_labels(c: Compilation, classes: Any) -> None:
    """Rewrite what indexes matrices of so many `classes`."""
    if not isinstance(classes, int):
        return
    for node in list(c.graph.nodes):
        if node.target is aten.index.Tensor and _is_of_labels(node, classes):
            chosen = c.emit(aten.gather.default, first_input(node), 1, _index(c, node, classes), like=node)
            replace_value(c, node, c.emit(aten.squeeze.dim, chosen, 1, like=node))
        elif (
            node.target is aten.index_put.default
            and _is_of_labels(node, classes)
            and fusible.is_zero(first_input(node))
        ):
            zeros, index = first_input(node), _index(c, node, classes)
            given = c.emit(aten.unsqueeze.default, argument(node, "values"), 1, like=node)
            replace_value(c, node, c.emit(aten.scatter_add.default, zeros, 1, index, given, like=node))


def _is_of_labels(node: fx.Node, classes: int) -> bool:
    """Return True if `node` takes one class of every row of a matrix, or puts one there."""
    x, indices = value(first_input(node)), argument(node, "indices")
    if x.dim() != 2 or x.shape[1] != classes or len(indices) != 2 or None in indices:
        return False
    if node.target is aten.index_put.default and value(node_argument(node, "values")).dim() != 1:
        return False
    rows, labels = indices
    return (
        rows.target is prims.iota.default
        and (rows.kwargs.get("start"), rows.kwargs.get("step")) == (0, 1)
        and value(labels).dtype is torch.int64
        and all(value(i).dim() == 1 and str(value(i).shape[0]) == str(x.shape[0]) for i in indices)
    )


def _index(c: Compilation, node: fx.Node, classes: int) -> fx.Node:
    _, labels = argument(node, "indices")
    from_the_end = c.emit(aten.add.Tensor, labels, classes, like=node)
    below = c.emit(aten.lt.Scalar, labels, 0, like=node)
    return c.emit(aten.unsqueeze.default, c.emit(aten.where.self, below, from_the_end, labels, like=node), 1, like=node)
