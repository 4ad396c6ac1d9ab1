"""Call matmuls: on CUDA, an FP8 matmul that is one call of a library is that call in Inductor's code.

Before      %y = fp8.scaled_mm(%p, %s, row, %q, %t, tensor, None, bf16, False)
After       %r = clone(expand(view(%t, [-1, 1]), [N, 1]))
            %y = _scaled_mm(%p, permute(%q, [1, 0]), %s, permute(%r, [1, 0]), None, None, bf16, False)

Sound because `kernels/matmul/scaled_mm.py`, which is fp8.scaled_mm on CUDA, makes the same call. It is Python, though,
and takes the host some 40 µs; a small model, or one whose blocks are sharded, waits for its host. What is no single
call (blocks, groups of rows, batches, other dtypes than BF16) stays as it is; so does what has a size that only the
data knows, where Inductor could not tell how operands lie in memory; so does everything where Inductor is to tune
matmuls, whose own kernels need not round as these do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether matmuls are to be tuned
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fp8compile import ops
from fp8compile.passes.core.collectives import SPLITS, VIEWS
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.node_views import Getitem, first_input
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.regions.region_graph import GraphEditor

RESHAPED = (*VIEWS, aten.reshape.default)  # which Inductor turns views into first
PARTS = (aten.select.int, aten.slice.Tensor, aten.unbind.int, *SPLITS)
CALLED = "fp8_called"  # in the metadata of a matmul
IN_ONE_CALL = ("tensor", "row")  # granularities that aten._scaled_mm takes


def run(c: HalfGraph) -> None:
    """Make calls of the matmuls of a half."""
    call_matmuls(c.graph)


def call_matmuls(graph: fx.Graph) -> None:
    """Make calls of the matmuls of `graph` that can be."""
    if is_tuned():
        return
    editor = GraphEditor(graph)
    for node in list(graph.find_nodes(op="call_function", target=ops.scaled_mm)):
        if is_one_call(node):
            call(editor, node)


def is_tuned() -> bool:
    """Return True if Inductor is to tune matmuls."""
    return inductor_config.max_autotune or inductor_config.max_autotune_gemm


def is_one_call(node: fx.Node) -> bool:
    """Return True if aten._scaled_mm does it all: two matrices, their scales, an addition at most, and BF16; it takes
    no sizes that only the data knows."""
    mm = ScaledMM(node)
    return (
        mm.granularity_a in IN_ONE_CALL
        and mm.granularity_b in IN_ONE_CALL
        and value(mm.a).dim() == 2
        and not any(has_free_unbacked_symbols(value(x)) for x in (mm.a, mm.b))
        and mm.out_dtype == torch.bfloat16
        and (mm.bias is None or value(mm.bias).dtype == torch.bfloat16)
        and mm.offs is None
    )


def call(editor: GraphEditor, node: fx.Node) -> None:
    """Make `node`, which is one call, that call."""
    mm = ScaledMM(node)

    def emit(target: Any, *args: Any) -> fx.Node:
        return editor.emit(target, *args, before=node, like=node)

    def of_rows(scale: fx.Node, matrix: fx.Node) -> fx.Node:
        rows = value(matrix).shape[0]
        flat = emit(aten.view.default, scale, [-1, 1])
        if same(value(flat).shape[0], rows):
            as_it_lies = same(value(flat).stride(0), 1) and not _is_part(scale)
            return flat if as_it_lies else emit(aten.clone.default, flat)
        count = rows if isinstance(rows, int) else emit(aten.sym_size.int, matrix, 0)
        return emit(aten.clone.default, emit(aten.expand.default, flat, [count, 1]))

    if mm.granularity_a == mm.granularity_b == "tensor":
        scale_a, scale_b = (emit(aten.clone.default, s) if _is_part(s) else s for s in (mm.scale_a, mm.scale_b))
    else:
        scale_a = of_rows(mm.scale_a, mm.a)
        scale_b = emit(aten.permute.default, of_rows(mm.scale_b, mm.b), [1, 0])
    columns = emit(aten.permute.default, mm.b, [1, 0])
    bias = mm.bias
    if bias is not None and not value(bias).is_contiguous():  # cuBLAS reads it as if it were
        bias = emit(aten.clone.default, bias)
    how = (bias, None, mm.out_dtype, mm.fast_accumulation)
    product = emit(aten._scaled_mm.default, mm.a, columns, scale_a, scale_b, *how)
    product.meta[CALLED] = True
    node.replace_all_uses_with(product)
    editor.graph.erase_node(node)


def _is_part(scale: fx.Node) -> bool:
    """Return True if a scale is one of several in memory: cuBLAS wants it to begin at a multiple of 16 bytes."""
    while scale.target in RESHAPED:
        scale = first_input(scale)
    if scale.op == "placeholder":  # of backward: what forward has saved may be one of several
        x = value(scale)
        return x.storage_offset() * x.itemsize % 16 != 0
    item = Getitem.of(scale)
    return scale.target in PARTS or (item is not None and item.source.target in PARTS)
