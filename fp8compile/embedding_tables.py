"""Embedding tables: the parameters in which graphs of this process look up rows.

An output head that shares its weight with one may be in another graph, behind a break.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

LOOKUPS = (functional.embedding, functional.embedding_bag, torch.embedding)

_tables: dict[int, weakref.ref[torch.nn.Parameter]] = {}  # by identity, as long as they live


def note_tables(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Note the parameters among the inputs of Dynamo's graph in which it looks up rows."""
    for node, x in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        if isinstance(x, torch.nn.Parameter) and not is_table(x) and any(u.target in LOOKUPS for u in node.users):
            _tables[id(x)] = weakref.ref(x)
            weakref.finalize(x, _tables.pop, id(x), None)


def is_table(x: Any) -> bool:
    """Return True for a parameter in which a graph that was compiled looks up rows."""
    known = _tables.get(id(x))
    return known is not None and known() is x
