"""Share casts: use the cast that one matmul reads for every other matmul that needs the same.

Before      %a1 = fp8.amax(%x, row)   %a2 = fp8.amax(%x, row)      After   %a1 = fp8.amax(%x, row)
            %q1 = fp8.quantize(…)     %q2 = fp8.quantize(…)                %q1 = fp8.quantize(…)
            %a3 = fp8.amax(%x, tensor)                                     %a3 = fp8.amax(%a1, tensor)

Markers are pure functions, so equal arguments give equal results; delayed scales are not, and stay. A tensor's amax
is the maximum of its rows' amaxes (COAT's "group scaling", arXiv 2410.19313 §4): no second read of the tensor.
A weight that is used in both halves therefore gets its amax once a step.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.passes.core.compilation import Compilation, aten, sort_topologically
from fp8compile.passes.core.marker_views import Amax, GroupedPart
from fp8compile.passes.core.replace import replace_value

PURE = {*ops.CASTS, ops.grouped_cast, aten.cat.default, aten.maximum.default}


def run(c: Compilation) -> None:
    """Merge equal markers, then derive tensor amaxes from finer ones."""
    unify(c)
    finer: dict[fx.Node, fx.Node] = {}
    amaxes = [amax for node in c.graph.nodes if (amax := Amax.of(node)) is not None]
    for amax in amaxes:
        if amax.granularity != "tensor":
            finer.setdefault(amax.x, amax.node)
    for amax in amaxes:
        if amax.granularity == "tensor" and amax.x in finer:
            replace_value(c, amax.node, c.emit(ops.amax, finer[amax.x], "tensor", like=amax.node))
    unify(c)
    sort_topologically(c.graph)


def unify(c: Compilation) -> None:
    """Merge equal markers."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(c.graph.nodes):
        if node.target not in PURE and GroupedPart.of(node) is None:
            continue
        same = known.setdefault((node.target, _key(node)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            c.graph.erase_node(node)


def _key(node: fx.Node) -> Any:
    """Return what decides a marker's value. The amax of a whole tensor is the same whichever way it is written."""
    amax = Amax.of(node)
    if amax is not None and amax.granularity == "tensor":
        return amax.x, amax.granularity
    return _frozen(node.args)


def _frozen(args: Any) -> Any:
    return tuple(_frozen(a) if isinstance(a, (list, tuple)) else a for a in args)
