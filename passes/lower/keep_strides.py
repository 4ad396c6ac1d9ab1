"""Keep strides: matmuls that are calls, grouped ones, and attention read what they were given, as it lies in memory.

Before      %y = _scaled_mm(%p, %columns, %s, %t, …)
After       %k = force_stride_order(%p, (64, 1))  …      %y = _scaled_mm(%k, …)

Inductor may lay out what it computes otherwise. A grouped matmul that contracts the tokens of each group stops the
program where these lie side by side, unless each group has a multiple of 16 bytes of them. cuBLAS takes rows, columns,
and their scales in one way only. Of attention's inputs Inductor looks at the strides that a buffer would have if it
were laid out there and then, and, where those will do, leaves it open: what is fused later with others that lie across
(a position bias with the table that it is looked up in) then does so, too.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.inductor_prims import force_stride_order  # as its own passes keep strides
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.core.stride_demands import demanded
from fp8compile.passes.lower.call_matmuls import CALLED
from fp8compile.passes.regions.part_values import RefusedError
from fp8compile.passes.regions.region_graph import GraphEditor

# Where a graph has this method, torch warns of symbols among a node's arguments, and orders strides that are nodes.
# Older versions (2.11, 2.12) order symbols by their guards, and stop at a node that is a maximum ("Max(1, …) > 1").
ARE_NODES = hasattr(fx.Graph, "materialize_symints")
KEPT = operators.SCALED_DOT_PRODUCT | {"aten::_grouped_mm"}  # operators that Inductor's layouts may not reach


def run(c: HalfGraph) -> None:
    """Keep the strides of what calls of matmuls and attentions read."""
    keep_strides(c.graph)


def keep_strides(graph: fx.Graph) -> None:
    """Have Inductor keep the strides of what calls of matmuls and attentions of `graph` read."""
    editor = GraphEditor(graph)
    for node in list(graph.nodes):
        for given in dict.fromkeys(_read_by_strides(node)):
            _keep(editor, node, given)


def _read_by_strides(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of `node` whose strides must stay."""
    if node.target is aten._scaled_mm.default and node.meta.get(CALLED):
        operands_and_scales = [a for a in node.args[:4] if isinstance(a, fx.Node)]
        return [a for a in operands_and_scales if value(a).dim() == 2]
    if operators.name_of(node.target) in KEPT:
        least = 3 if operators.is_attention(node.target) else 2
        inputs = [x for _, x in demanded(node).values() if value(x).dim() >= least and x.op == "call_function"]
        return [x for x in inputs if not has_free_unbacked_symbols(value(x))]
    return []


def _keep(editor: GraphEditor, node: fx.Node, given: fx.Node) -> None:
    """Have `node` read `given` with the strides that it has here; of what is expanded, what lies beneath keeps its own,
    as no memory can be written through a stride of 0."""
    x = value(given)
    if any(same(stride, 0) and not same(n, 1) for stride, n in zip(x.stride(), x.shape, strict=True)):
        if given.target is aten.expand.default and first_input(given).op == "call_function":
            _keep(editor, given, first_input(given))
        return
    strides = _named(editor, x.stride(), node) if ARE_NODES else x.stride()
    with editor.graph.inserting_before(node):
        kept = editor.graph.call_function(force_stride_order, (given, strides))
    kept.meta = dict(given.meta)
    node.replace_input_with(given, kept)


def _named(editor: GraphEditor, strides: tuple[Any, ...], node: fx.Node) -> tuple[Any, ...]:
    """Return strides with a node for each symbol; as they are, where the graph computes one behind `node` or never."""
    try:
        named = tuple(editor.size_node(stride, node) for stride in strides)
    except RefusedError:
        return strides
    return named if all(x < node for x in named if isinstance(x, fx.Node)) else strides
