"""Matmuls of few rows: in inference, a launch of the kernel that only has to read its weight.

Before      %y = fp8.scaled_mm(%p, %s, row, %q, %t, row, None, bf16)                     %p [M, K], M ≤ 64
After       %z = full([tiles], 0)                                                         once a graph
            %k = triton_kernel_wrapper_functional(few_rows, grid, {a: %p, b: %q, …, out: %y0, arrived: %z})
            %y = %k["out"]                                  %z' = %k["arrived"], zero again, for the next launch

With scales of rows cuBLAS takes much longer for few rows than their weight takes to be read, where it has few tiles;
`kernels/matmul/few_rows.py` does not. With a scale for each tensor neither does cuBLAS: those matmuls stay calls.

Sound because it is the same sum, in FP32; the order of its terms is another. Where Inductor is to tune matmuls, they
stay as they are, like those of `call_matmuls`, as do those of symbolic sizes, which may be many rows.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.empty_tensors import new_empty
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.lower.call_matmuls import is_one_call, is_tuned
from fp8compile.passes.lower.known_accesses import declare
from fp8compile.passes.lower.launch_nodes import empty_node, launch_node
from fp8compile.passes.regions.region_graph import GraphEditor

MOST_ROWS = 64


def run(c: HalfGraph) -> None:
    """Launch the matmuls of few rows of a graph for inference."""
    if c.half == "inference" and not is_tuned():
        launch_few_rows(c.graph)


def launch_few_rows(graph: fx.Graph) -> None:
    """Replace the matmuls of few rows of `graph`, on CUDA, by launches."""
    found = [node for node in graph.find_nodes(op="call_function", target=ops.scaled_mm) if has_few_rows(node)]
    if not found:
        return
    from fp8compile.kernels.matmul.few_rows import launch_of  # Triton is imported where there is a GPU

    editor = GraphEditor(graph)
    launches = []
    for node in found:
        mm = ScaledMM(node)
        (m, k), n = value(mm.a).shape, value(mm.b).shape[0]
        how = (mm.granularity_a, mm.granularity_b, mm.bias is not None, mm.fast_accumulation)
        launches.append(launch_of(m, n, k, *how))
    most = max(launch.tiles for launch in launches)
    device = {"dtype": torch.int32, "device": value(found[0]).device, "pin_memory": False}
    with graph.inserting_before(found[0]):
        arrived = graph.call_function(aten.full.default, ([most], 0), device)
    arrived.meta = {"val": new_empty(value(found[0]), [most], torch.int32)}
    for node, launch in zip(found, launches, strict=True):
        arrived = _launch(editor, node, launch, arrived)
    if not arrived.users:
        graph.erase_node(arrived)


def has_few_rows(node: fx.Node) -> bool:
    """Return True for matrices of known sizes, one of few rows, that give BF16, and have scales of rows."""
    mm = ScaledMM(node)
    if not is_one_call(node) or mm.granularity_a == mm.granularity_b == "tensor":
        return False
    sizes = (*value(mm.a).shape, *value(mm.b).shape)
    if not all(isinstance(size, int) for size in sizes) or not 0 < sizes[0] <= MOST_ROWS or 0 in sizes:
        return False
    return value(mm.a).is_contiguous() and value(mm.b).is_contiguous()  # cuBLAS takes parts of wider rows as well


def _launch(editor: GraphEditor, node: fx.Node, launch: Any, arrived: fx.Node) -> fx.Node:
    """Replace `node` by a launch, and return the counts that it leaves."""
    mm, graph, out = ScaledMM(node), editor.graph, value(node)

    def flat(given: fx.Node) -> fx.Node:
        x = editor.emit(aten.reshape.default, given, [-1], before=node, like=node)
        as_it_lies = value(x).stride(0) == 1 or value(x).numel() == 1
        return x if as_it_lies else editor.emit(aten.clone.default, x, before=node, like=node)

    scales = flat(mm.scale_a), flat(mm.scale_b)
    bias = None if mm.bias is None else flat(mm.bias)
    partial = new_empty(out, [launch.partial], torch.float32)
    counts = new_empty(out, list(value(arrived).shape), torch.int32)
    with graph.inserting_before(node):
        buffers = {"out": empty_node(graph, out, out.shape), "partial": empty_node(graph, partial, partial.shape)}
        read = {"a": mm.a, "b": mm.b, "scale_a": scales[0], "scale_b": scales[1], "bias": bias or scales[1]}
        written = {"out": out, "partial": partial, "arrived": counts}
        given = {**read, **buffers, "arrived": arrived}
        call = launch_node(node, _kernel(), launch.grid, given, written, launch.constants)
        product, left = (graph.call_function(operator.getitem, (call, name)) for name in ("out", "arrived"))
    product.meta = dict(node.meta)
    left.meta = {"val": counts}
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return left


@functools.cache
def _kernel() -> Any:
    """Return the kernel with its number of warps and stages, as an autotuner with a single configuration."""
    import triton

    from fp8compile.kernels.matmul.few_rows import ARGUMENTS, STAGES, WARPS, WRITTEN, few_rows

    declare(few_rows, [name for name in ARGUMENTS if name not in WRITTEN], WRITTEN)
    return triton.autotune(configs=[triton.Config({}, num_warps=WARPS, num_stages=STAGES)], key=[])(few_rows)
