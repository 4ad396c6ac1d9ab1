"""Lower markers: after the cut into forward and backward, amax, scale, quantize and dequantize become plain aten.

Before      %q = fp8.quantize(%x, %s, e4m3, row)
After       %f = convert_element_type(%x, f32);  %d = div(%f, %s);  … %q = convert_element_type(%c, e4m3)

Inductor then fuses them with their neighbours. The aten nodes are the trace of `kernels/reference/markers.py` itself,
so there is one definition. A cast that reads what would have been stored gets it through a view as integers and back:
Inductor would leave out the rounding to BF16 where it computes the tensor in the same kernel. scaled_mm and
delayed_scale stay
operators: their operands need exact strides, and a history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher  # what pads by a symbolic number goes through Python alone
from torch._inductor.decomposition import select_decomp_table  # nodes born after AOTAutograd must be decomposed already
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.passes.core.compilation import AS_STORED, aten, value
from fp8compile.passes.core.node_views import call_of, first_input
from fp8compile.passes.core.stages import HalfGraph


def run(c: HalfGraph) -> None:
    """Replace the cast markers of a half."""
    lower_markers(c.graph)


def lower_markers(graph: fx.Graph) -> None:
    """Replace every cast marker of `graph` by the trace of its reference."""
    for node in list(graph.nodes):
        if node.target in ops.CASTS:
            _inline(graph, node, _trace(node))


def _trace(node: fx.Node) -> fx.GraphModule:
    """Return the reference of `node` as a graph of aten operators over its tensor arguments."""
    reference = ops.CASTS[call_of(node)]
    tensors = node.all_input_nodes

    def call(*values: Any) -> torch.Tensor:
        given = dict(zip(tensors, values, strict=True))
        return reference(*fx.map_arg(node.args, given.__getitem__), **node.kwargs)

    fakes = [t.meta["val"] for t in tensors]
    with fakes[0].fake_mode, enable_python_dispatcher():
        return _make_fx(call)(*fakes)


def _make_fx(call: Callable[..., torch.Tensor]) -> Callable[..., fx.GraphModule]:
    return make_fx(call, decomposition_table=select_decomp_table(), tracing_mode="real")


def _inline(graph: fx.Graph, node: fx.Node, traced: fx.GraphModule) -> None:
    env: dict[fx.Node, Any] = {}
    arguments = iter(node.all_input_nodes)
    first = node.all_input_nodes[0]
    with graph.inserting_before(node):
        if AS_STORED in node.meta and value(first).dtype == torch.bfloat16:
            env[first] = _as_stored(graph, first)
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                argument = next(arguments)
                env[inner] = env.get(argument, argument)
            elif inner.op == "output":
                node.replace_all_uses_with(env[first_input(inner)])
            else:
                env[inner] = graph.node_copy(inner, env.__getitem__)
    graph.erase_node(node)


def _as_stored(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return `node` with the bits that it has in memory."""
    for dtype in (torch.int16, torch.bfloat16):
        x = value(node).view(dtype)
        node = graph.call_function(aten.view.dtype, (node, dtype))
        node.meta["val"] = x
    return node
