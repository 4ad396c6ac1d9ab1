"""Call matmuls: on CUDA, an FP8 matmul that is one call of a library is that call in Inductor's code.

Before      %y = fp8.scaled_mm(%p, %s, row, %q, %t, tensor, None, bf16, False)
After       %r = clone(expand(view(%t, [-1, 1]), [N, 1]))
            %y = _scaled_mm(%p, permute(%q, [1, 0]), %s, permute(%r, [1, 0]), None, None, bf16, False)

Sound because `kernels/matmul.py`, which is fp8.scaled_mm on CUDA, makes the same call. It is Python, though, and takes
the host some 40 µs; a small model, or one whose blocks are sharded, waits for its host. What is no single call (blocks,
groups of rows, batches, other dtypes than BF16) stays as it is; so does what has a size that only the data knows, where
Inductor could not tell how operands lie in memory; so does everything where Inductor is to tune matmuls, whose own
kernels need not round as these do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether matmuls are to be tuned
from torch._inductor.inductor_prims import force_stride_order  # as its own passes keep strides
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fp8compile import ops
from fp8compile.passes import operators
from fp8compile.passes.collectives import SPLITS, VIEWS
from fp8compile.passes.compilation import aten, value
from fp8compile.passes.iteration import same
from fp8compile.passes.region_graph import GraphEditor
from fp8compile.passes.stride_demands import demanded

RESHAPED = (*VIEWS, aten.reshape.default)  # which Inductor turns views into first
PARTS = (aten.select.int, aten.slice.Tensor, aten.unbind.int, *SPLITS)
CALLED = "fp8_called"  # in the metadata of a matmul
KEPT = operators.SCALED_DOT_PRODUCT | {"aten::_grouped_mm"}  # operators that Inductor's layouts may not reach
IN_ONE_CALL = ("tensor", "row")  # granularities that aten._scaled_mm takes


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


def keep_strides(graph: fx.Graph) -> None:
    """Have these matmuls, grouped ones, and attention read what they were given: Inductor may lay out what it computes
    otherwise.

    A grouped matmul that contracts the tokens of each group stops the program where these lie side by side, unless each
    group has a multiple of 16 bytes of them. cuBLAS takes rows, columns, and their scales in one way only. Of
    attention's inputs Inductor looks at the strides that a buffer would have if it were laid out there and then, and,
    where those will do, leaves it open: what is fused later with others that lie across (a position bias with the table
    that it is looked up in) then does so, too.
    """
    for node in list(graph.nodes):
        if node.target is aten._scaled_mm.default and node.meta.get(CALLED):
            kept = [a for a in node.args[:4] if value(a).dim() == 2]  # type: ignore[arg-type]
        elif operators.name_of(node.target) in KEPT:
            least = 3 if operators.is_attention(node.target) else 2
            inputs = [x for _, x in demanded(node).values() if value(x).dim() >= least and x.op == "call_function"]
            kept = [x for x in inputs if not has_free_unbacked_symbols(value(x))]
        else:
            continue
        for given in dict.fromkeys(kept):
            _keep(graph, node, given)  # type: ignore[arg-type]


def _keep(graph: fx.Graph, node: fx.Node, given: fx.Node) -> None:
    """Have `node` read `given` with the strides that it has here; of what is expanded, what lies beneath keeps its own,
    as no memory can be written through a stride of 0."""
    if any(
        same(stride, 0) and not same(n, 1) for stride, n in zip(value(given).stride(), value(given).shape, strict=True)
    ):
        if given.target is aten.expand.default and given.args[0].op == "call_function":  # type: ignore[union-attr]
            _keep(graph, given, given.args[0])  # type: ignore[arg-type]
        return
    with graph.inserting_before(node):
        kept = graph.call_function(force_stride_order, (given, value(given).stride()))
    kept.meta = dict(given.meta)
    node.replace_input_with(given, kept)
