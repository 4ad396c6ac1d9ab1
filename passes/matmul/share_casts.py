"""Share casts: what was cast for one matmul is not cast again for another.

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
from fp8compile.passes.core.replace import replace_value

PURE = {*ops.CASTS, aten.cat.default, aten.maximum.default}


def run(c: Compilation) -> None:
    """Merge equal markers, then derive tensor amaxes from finer ones."""
    _unify(c)
    finer: dict[fx.Node, fx.Node] = {}
    for node in c.graph.nodes:
        if node.target is ops.amax and node.args[1] != "tensor":
            finer.setdefault(node.args[0], node)
    for node in list(c.graph.nodes):
        if node.target is ops.amax and node.args[1] == "tensor" and node.args[0] in finer:
            source = finer[node.args[0]]
            replace_value(c, node, c.emit(ops.amax, source, "tensor", like=node))
    _unify(c)
    sort_topologically(c.graph)


def _unify(c: Compilation) -> None:
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(c.graph.nodes):
        if node.target not in PURE:
            continue
        same = known.setdefault((node.target, _key(node)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            c.graph.erase_node(node)


def _key(node: fx.Node) -> Any:
    """What decides a marker's value. The amax of a whole tensor is the same whichever way the tensor is written."""
    if node.target is ops.amax and node.args[1] == "tensor":
        return node.args[:2]
    return _frozen(node.args)


def _frozen(args: Any) -> Any:
    return tuple(_frozen(a) if isinstance(a, (list, tuple)) else a for a in args)
