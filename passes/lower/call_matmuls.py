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

import operator
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether matmuls are to be tuned
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fp8compile import ops
from fp8compile.passes.core.collectives import SPLITS, VIEWS
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.iteration import same
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
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return
    editor = GraphEditor(graph)
    for node in list(graph.find_nodes(op="call_function", target=ops.scaled_mm)):
        if is_one_call(node):
            call(editor, node)


def is_one_call(node: fx.Node) -> bool:
    """Whether aten._scaled_mm does it all: two matrices, their scales, an addition at most, and BF16; and no sizes that
    only the data knows, nor symbolic numbers of rows where a scale is repeated for each."""
    a, _, granularity_a, b, _, granularity_b, bias, dtype, *rest = node.args
    return (
        granularity_a in IN_ONE_CALL
        and granularity_b in IN_ONE_CALL
        and value(a).dim() == 2  # type: ignore[arg-type]
        and not any(has_free_unbacked_symbols(value(x)) for x in (a, b))  # type: ignore[arg-type]
        and dtype == torch.bfloat16
        and (bias is None or value(bias).dtype == torch.bfloat16)  # type: ignore[arg-type]
        and not any(x is not None for x in rest[1:])  # no groups
        and (granularity_a == granularity_b or all(_has_known_rows(x) for x in (a, b)))
    )


def _has_known_rows(node: Any) -> bool:
    return isinstance(value(node).shape[0], int)


def call(editor: GraphEditor, node: fx.Node) -> None:
    """Make `node`, which is one call, that call."""
    a, scale_a, granularity_a, b, scale_b, granularity_b, bias, dtype, *rest = node.args

    def emit(target: Any, *args: Any) -> fx.Node:
        return editor.emit(target, *args, before=node, like=node)

    def of_rows(scale: Any, rows: int) -> fx.Node:
        flat = emit(aten.view.default, scale, [-1, 1])
        if same(value(flat).shape[0], rows):
            as_it_lies = same(value(flat).stride(0), 1) and not _is_part(scale)
            return flat if as_it_lies else emit(aten.clone.default, flat)
        return emit(aten.clone.default, emit(aten.expand.default, flat, [rows, 1]))

    if granularity_a == granularity_b == "tensor":
        scale_a, scale_b = (emit(aten.clone.default, s) if _is_part(s) else s for s in (scale_a, scale_b))
    else:
        scale_a = of_rows(scale_a, value(a).shape[0])  # type: ignore[arg-type]
        scale_b = emit(aten.permute.default, of_rows(scale_b, value(b).shape[0]), [1, 0])  # type: ignore[arg-type]
    columns = emit(aten.permute.default, b, [1, 0])
    fast = bool(rest and rest[0])
    product = emit(aten._scaled_mm.default, a, columns, scale_a, scale_b, bias, None, dtype, fast)
    product.meta[CALLED] = True
    node.replace_all_uses_with(product)
    editor.graph.erase_node(node)


def _is_part(scale: Any) -> bool:
    """Whether a scale is one of several in memory: cuBLAS wants it to begin at a multiple of 16 bytes."""
    while scale.target in RESHAPED:
        scale = scale.args[0]
    if scale.op == "placeholder":  # of backward: what forward has saved may be one of several
        x = value(scale)
        return x.storage_offset() * x.itemsize % 16 != 0
    return scale.target in PARTS or (scale.target is operator.getitem and scale.args[0].target in PARTS)
