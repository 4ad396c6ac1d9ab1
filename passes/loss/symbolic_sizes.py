"""Symbolic sizes that a graph reads of logits, or of what is made of them, are read elsewhere, where they are known.

Before      %n = sym_size(view(%logits, [B·S, N]), 0)                  After    %m = mul(%B, %S)
            … expand(%dloss, [%n])                                              … expand(%dloss, [%m])

Else logits would have to be there for the sake of their size. Sound because both numbers are one expression of the same
symbols.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.core.compilation import dependents, remove_dead, sort_topologically


def read_elsewhere(graph: fx.Graph, logits: fx.Node) -> None:
    """Let what reads a size that depends on `logits` read an equal one that does not, if the graph has one."""
    depending = dependents(graph, [logits])
    sizes = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    known = {str(node.meta["val"]): node for node in reversed(sizes) if node not in depending}
    equal = {node: known[text] for node in sizes if node in depending and (text := str(node.meta["val"])) in known}
    for node, other in equal.items():
        node.replace_all_uses_with(other)
    if equal:
        remove_dead(graph)
        sort_topologically(graph)
