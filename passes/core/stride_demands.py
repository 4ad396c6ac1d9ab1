"""Stride demands: what operators whose kernels look at strides must find, from the graph as it came until it runs.

    any     what computes the same however its inputs lie in memory: the table of `passes/core/operators.py`
    rows    attention, of what it reads by rows: elements of the last dimension side by side, where they came so
    aligned attention, of its bias or mask: the same, and rows that begin at multiples of 16 elements, where they came
            so; torch fills up rows for that, and gives attention a slice
    exact   everything else: operators of libraries and users, whose kernels may have strides compiled in; `as_strided`,
            which reads memory instead of elements; what attention's backward reads of attention's own results

`record` writes into an operator's metadata how its inputs lie; there it goes along wherever the node is copied: into
both halves, and where backward computes it again. `broken_strides` compares, at any stage. A pass that gives an
operator another layout on purpose records it anew.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import keystr, tree_flatten_with_path  # no public name; names leaves of nested arguments

from fp8compile.errors import VerificationError
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import VIEWS, is_tensor, value
from fp8compile.passes.core.sizes import divides, same_sizes

RECORDED = "fp8_strides"  # in a node's metadata: the demand on each input, and its strides when that was recorded
ROWS, ALIGNED, EXACT = "rows", "aligned", "exact"
OF_ATTENTION = {
    **dict.fromkeys(("query", "key", "value"), ROWS),
    **dict.fromkeys(("attn_bias", "attn_mask", "bias"), ALIGNED),
}
ROW_MULTIPLE = 16  # elements, to which torch fills up the rows of a bias
Broken = Collection[tuple[fx.Node, str]]  # operators and arguments whose demands do not hold


def demanded(node: fx.Node) -> dict[str, tuple[str, fx.Node]]:
    """Return the inputs on whose strides `node` makes a demand, by argument: the demand and the input."""
    if node.op != "call_function" or operators.takes_any_strides(node.target):
        return {}
    given = operators.arguments(node) if isinstance(node.target, torch._ops.OpOverload) else [node.args, node.kwargs]
    attention = operators.is_attention(node.target)
    found = {}
    for path, x in tree_flatten_with_path(given)[0]:
        if isinstance(x, fx.Node) and is_tensor(x) and value(x).layout == torch.strided:
            name = keystr(path)
            found[name] = (OF_ATTENTION.get(_name(path[0]), EXACT) if attention else EXACT, x)
    return found


def _name(key: Any) -> Any:
    return getattr(key, "key", None)


def is_demanded(node: fx.Node) -> bool:
    """Return whether an operator that demands more than rows of its inputs reads `node` or a view of it."""
    for user in node.users:
        if any(x is node and demand != ROWS for demand, x in demanded(user).values()):
            return True
        if user.target in VIEWS and is_demanded(user):
            return True
    return False


def record(graph: fx.Graph) -> None:
    """Write into the metadata of every operator that demands strides what it has been given."""
    for node in graph.nodes:
        record_node(node)


def record_node(node: fx.Node) -> None:
    """Write it into the metadata of one node, perhaps anew."""
    if found := demanded(node):
        node.meta[RECORDED] = {name: (demand, tuple(value(x).stride())) for name, (demand, x) in found.items()}


def is_met(demand: str, x: torch.Tensor, strides: Collection[Any]) -> bool:
    """Return True if `x` lies in memory as an operator demands that found these strides."""
    if not x.dim() or len(strides) != x.dim():
        return True
    wanted = tuple(strides)
    significant = [d for d, n in enumerate(x.shape) if not same_sizes([n], [1])]
    in_rows = not same_sizes(wanted[-1:], [1]) or same_sizes(x.stride()[-1:], [1]) or same_sizes(x.shape[-1:], [1])
    if demand == ROWS:
        return in_rows
    if demand == ALIGNED:
        outer = [d for d in significant if d + 1 < x.dim() and divides(ROW_MULTIPLE, wanted[d])]
        return in_rows and all(divides(ROW_MULTIPLE, x.stride(d)) for d in outer)
    if any(same_sizes([n], [0]) for n in x.shape):
        return True
    return same_sizes([x.stride(d) for d in significant], [wanted[d] for d in significant])


def broken_strides(graph: fx.Graph) -> dict[tuple[fx.Node, str], str]:
    """Return the recorded demands of `graph` that do not hold: operator and argument, and what is wrong."""
    broken = {}
    for node in graph.nodes:
        recorded = node.meta.get(RECORDED)
        if not recorded:
            continue
        for name, (_, x) in demanded(node).items():
            demand, strides = recorded.get(name, (EXACT, value(x).stride()))
            if not is_met(demand, value(x), strides):
                lies = f"lies in memory as {tuple(value(x).stride())}, not as {strides}"
                broken[node, name] = (
                    f"%{node.name} ({operators.shown(node.target)}): its argument {name}, %{x.name}, {lies}"
                )
    return broken


def check_strides(graph: fx.Graph, stage: str, known: Broken = ()) -> None:
    """Raise `VerificationError` where a demand does not hold after `stage`; `known`: where it did not before either."""
    for place, why in broken_strides(graph).items():
        if place not in known:
            raise VerificationError(f"after {stage}: {why}")
