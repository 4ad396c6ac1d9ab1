"""Launches in place: launches of generated kernels become what Inductor lowers, without a trace of each.

Before      %k = triton_kernel_wrapper_functional(kernel, grid, {x0: %x, y0: %y0}, tensors_to_clone=[])
After       triton_kernel_wrapper_mutation(kernel, grid, {x0: %x, y0: %y0})

torch traces the definition of the first, with two tracers, for every launch: 8 ms each, and a model of six layers has
180. Where torch has found that nothing must be cloned, which holds for buffers of our own, one node is all there is
to it. Other launches, users' kernels among them, are left to torch.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import (  # torch's only forms for a Triton kernel in a graph
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._inductor.fx_passes import post_grad  # the pass that has no hook between it and the one before

from fp8compile.passes.lower.launch_nodes import LAUNCH

CLONED = "tensors_to_clone"  # the argument that only the first form has
EAGER = "eager_input_vals"  # in the metadata of a launch: values whose strides Inductor keeps


def decompose_directly() -> None:
    """Patch the pass of Inductor's that decomposes launches: those of generated kernels it finds decomposed."""
    decompose = post_grad.decompose_triton_kernel_wrapper_functional

    def decomposed(graph: fx.Graph) -> None:
        write_in_place(graph)
        decompose(graph)

    post_grad.decompose_triton_kernel_wrapper_functional = decomposed


def write_in_place(graph: fx.Graph) -> None:
    """Replace launches of generated kernels that clone nothing, and whose result nobody reads as a result."""
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        is_plain = not node.kwargs[CLONED] and not node.users and EAGER in node.meta
        if node.meta.get(LAUNCH) and is_plain:
            _write_in_place(graph, node)


def _write_in_place(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        written = graph.call_function(triton_kernel_wrapper_mutation, (), _but_clones(node.kwargs))
    args, kwargs = node.meta[EAGER]
    written.meta = {**node.meta, "val": None, EAGER: (args, _but_clones(kwargs))}
    graph.erase_node(node)


def _but_clones(kwargs: Any) -> dict[str, Any]:
    return {name: given for name, given in kwargs.items() if name != CLONED}
