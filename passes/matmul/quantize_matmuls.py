"""Quantize matmuls: carry out the plan with markers.

Before      %y = mm(%x, permute(%w))
After       %ax = fp8.amax(%x, row)         %sx = fp8.scale(%ax, e4m3)     %qx = fp8.quantize(%x, %sx, e4m3, row)
            %aw = fp8.amax(%w, tensor)      %sw = fp8.scale(%aw, e4m3)     %qw = fp8.quantize(%w, %sw, e4m3, tensor)
            %y  = fp8.scaled_mm(%qx, %sx, row, %qw, %sw, tensor, bias=None, bfloat16)

Each operand is cast into the layout in which the contracted dimension is contiguous (`passes/matmul/operand_casts.py`).
A contracted dimension that is no multiple of 16 is filled up with zeros, which add nothing to the sum; so is the last
dimension of the result, which is then cut off.

Where groups of tokens are contracted (grad_weight of experts), only the data knows what is to be filled up:

Before      %g = _grouped_mm(permute(%dy), %x, offs=%o)
After       %d = fp8.grouped_cast(%dy, %o, e4m3)     %qd, %sd, %ends = %d     %c = fp8.grouped_cast(%x, %o, e4m3)     …
            %g = fp8.scaled_mm(%qd, %sd, row, %qx, %sx, row, None, bfloat16, False, %ends)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import ALIGNMENT, LINE, ROW, parse_granularity
from fp8compile.passes.core.compilation import Compilation, aten, sort_topologically, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import divides, same_sizes
from fp8compile.passes.matmul.operand_casts import cast_groups, cast_operand

GROUP_ROWS = 4  # cuBLAS reads the scales of grouped rows in pieces of four
MANY = 16 * LINE  # tokens: what fills them up to whole lines is one in sixteen, at most


def run(c: Compilation) -> None:
    """Replace every matmul that the plan converts."""
    seen: Counter[str] = Counter()
    for matmul in c.matmuls.converted:
        key = f"{c.namespace}/{matmul.path}/{matmul.role}"
        nth = seen[key]  # a module may hold several matmuls, or be called several times: each has its own history
        seen[key] += 1
        _rewrite(c, matmul, f"{key}#{nth}" if nth else key)
    sort_topologically(c.graph)


def _rewrite(c: Compilation, matmul: MatmulNode, key: str) -> None:
    node, (left, right), (left_cast, right_cast) = matmul.node, matmul.pair, matmul.casts
    m_rows, n_rows, cols = _multiples(matmul)
    offs = matmul.offs
    if offs is not None and matmul.contracts_groups:
        *left_operand, left_ends = cast_groups(c, left, True, left_cast, offs, m_rows, node)
        *right_operand, right_ends = cast_groups(c, right, False, right_cast, offs, n_rows, node)
        offs = right_ends if matmul.weight_on_left else left_ends  # of the gradient: backward casts it anyway
    else:
        left_operand = cast_operand(c, left, True, left_cast, f"{key}/left", m_rows, cols, node)
        right_operand = cast_operand(
            c, right, False, right_cast, f"{key}/right", n_rows, cols, node, of_experts=offs is not None
        )
        _know_as_equal(left_operand[0], right_operand[0])
    fits = matmul.bias is not None and same_sizes(value(matmul.bias).shape, [matmul.n]) and n_rows == m_rows == 1
    bias = matmul.bias if fits else None
    granularities = (left_cast.granularity, right_cast.granularity) if offs is None else (ROW.kind, ROW.kind)
    out = c.emit(
        ops.scaled_mm, *left_operand, granularities[0], *right_operand, granularities[1], bias,
        value(node).dtype, matmul.fast_accumulation, *([] if offs is None else [offs]), like=node,
    )  # fmt: skip
    for dim, multiple, size, source in ((-1, n_rows, matmul.n, right), (-2, m_rows, matmul.m, left)):
        if multiple > 1:
            length = _length(c, size, source, dim, node)
            _know_as_shorter(size, value(out).shape[dim])
            out = c.emit(aten.slice.Tensor, out, value(out).dim() + dim, 0, length, like=node)
    if matmul.bias is not None and bias is None:
        out = c.emit(aten.add.Tensor, out, matmul.bias, like=node)
    k = ("K of each group", ALIGNMENT) if matmul.contracts_groups else (f"K {matmul.k}", cols)
    c.matmuls.move(matmul, out)
    replace_value(c, node, out)
    matmul.padded = tuple(
        f"{what} to a multiple of {multiple}"
        for what, multiple in (k, (f"N {matmul.n}", n_rows), (f"M {matmul.m}", m_rows))
        if multiple > 1
    )


def _know_as_equal(left: fx.Node, right: fx.Node) -> None:
    """Let the sizes' environment know that two payloads contract equally many elements.

    Of the operands a guard says so, however their sizes are written (T // 4 · 4, say, and T); it says nothing of what
    those become when they are filled up to a multiple.
    """
    a, b = (value(x).shape[-1] for x in (left, right))
    if not same_sizes([a], [b]):
        torch._check(a == b)


def _know_as_shorter(size: Any, filled_up: Any) -> None:
    """Let the sizes' environment know that a size which only the data knows is no larger than what it was filled up to:
    a slice has that size then, and not the lesser of both."""
    if isinstance(size, torch.SymInt) and not size.node.has_hint():
        torch._check(size <= filled_up)


def _multiples(matmul: MatmulNode) -> tuple[int, int, int]:
    """Return the numbers of which m, n and k must become multiples; 1 where nothing is to be filled up."""
    k_multiple = contracted_multiple(matmul)
    cols = 1 if matmul.contracts_groups or divides(k_multiple, matmul.k) else k_multiple
    n_rows = 1 if divides(ALIGNMENT, matmul.n) else ALIGNMENT
    grouped = parse_granularity(matmul.casts[0].granularity).kind == "group"
    m_rows = GROUP_ROWS if grouped and not divides(GROUP_ROWS, matmul.m) else 1
    return m_rows, n_rows, cols


def contracted_multiple(matmul: MatmulNode) -> int:
    """Return the number of which what `matmul` contracts becomes a multiple.

    FP8 units want 16. Where many tokens are contracted, rows of codes that begin within a cache line make the kernel
    slower, but for those that begin at its half. Features are filled up to 16 alone: their casts serve other matmuls
    too, and may be what is kept of a tensor.
    """
    kinds = {parse_granularity(operand.granularity).kind for operand in matmul.casts}
    if matmul.role != "grad_weight" or not matmul.is_plain or not kinds <= {"tensor", "row"}:
        return ALIGNMENT
    is_short = isinstance(matmul.k, int) and matmul.k < MANY
    return ALIGNMENT if is_short or divides(LINE // 2, matmul.k) else LINE


def _length(c: Compilation, size: Any, source: fx.Node, dim: int, like: fx.Node) -> Any:
    """Return the size to cut the result to: a number, or a node that computes the symbolic one from its operand."""
    if isinstance(size, int):
        return size
    return c.emit(aten.sym_size.int, source, value(source).dim() + dim, like=like)
