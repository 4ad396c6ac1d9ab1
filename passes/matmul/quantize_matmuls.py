"""Quantize matmuls: carry out the plan with markers.

Before      %y = mm(%x, permute(%w))
After       %ax = fp8.amax(%x, row)         %sx = fp8.scale(%ax, e4m3)     %qx = fp8.quantize(%x, %sx, e4m3, row)
            %aw = fp8.amax(%w, tensor)      %sw = fp8.scale(%aw, e4m3)     %qw = fp8.quantize(%w, %sw, e4m3, tensor)
            %y  = fp8.scaled_mm(%qx, %sx, row, %qw, %sw, tensor, bias=None, bfloat16)

Each operand is cast into the layout in which the contracted dimension is contiguous: from the tensor that the graph
has, or transposed on the way. A concatenation is cast part by part into one buffer. A contracted dimension that is no
multiple of 16 is filled up with zeros, which add nothing to the sum; so is the last dimension of the result, which is
then cut off. A weight that arrived in FP8 is taken as it is (`passes/matmul/gathered_weights.py`).

Where groups of tokens are contracted (grad_weight of experts), only the data knows what is to be filled up:

Before      %g = _grouped_mm(permute(%dy), %x, offs=%o)
After       %d = fp8.grouped_cast(%dy, %o, e4m3)     %qd, %sd, %ends = %d     %c = fp8.grouped_cast(%x, %o, e4m3)     …
            %g = fp8.scaled_mm(%qd, %sd, row, %qx, %sx, row, None, bfloat16, False, %ends)

With one scale for all columns of a group ("tensor"), such a cast is given the amaxes of its tokens: the casts by rows
for output and grad_input have them.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.formats import ALIGNMENT, LINE, ROW, TENSOR, Granularity, parse_granularity
from fp8compile.passes.core.aten_views import Concatenation, Permutation
from fp8compile.passes.core.compilation import Compilation, aten, is_transpose_of, sort_topologically, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import divides, same_sizes
from fp8compile.passes.matmul.gathered_weights import Gathered, gathered
from fp8compile.plan.rows import Operand

GROUP_ROWS = 4  # cuBLAS reads the scales of grouped rows in pieces of four
MANY = 16 * LINE  # tokens: what fills them up to whole lines is one in sixteen, at most


@dataclass(frozen=True)
class Layout:
    """The orientation in which an operand's data is written, and the multiples to which it is filled up."""

    transpose: bool
    row_multiple: int = 1
    col_multiple: int = 1

    @property
    def args(self) -> tuple[bool, int, int]:
        """The layout as arguments of the operators."""
        return self.transpose, self.row_multiple, self.col_multiple


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
        *left_operand, left_ends = _groups(c, left, True, left_cast, offs, m_rows, node)
        *right_operand, right_ends = _groups(c, right, False, right_cast, offs, n_rows, node)
        offs = right_ends if matmul.weight_on_left else left_ends  # of the gradient: backward casts it anyway
    else:
        left_operand = cast_operand(c, left, True, left_cast, f"{key}/left", m_rows, cols, node)
        right_operand = cast_operand(c, right, False, right_cast, f"{key}/right", n_rows, cols, node)
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


def cast_operand(
    c: Compilation,
    node: fx.Node,
    contracted_last: bool,
    operand: Operand,
    key: str,
    rows: int,
    cols: int,
    like: fx.Node,
) -> tuple[fx.Node, fx.Node]:
    """Return (data, scale) of a left operand [M, K] or a right operand [K, N], as the matmul wants them."""
    source, transpose = _as_it_lies(node, contracted_last)
    weight = gathered(source)
    if operand.gathered and weight is not None:
        return _gathered(c, weight, transpose, like)
    cast = _Cast(c, operand, key, like)
    return cast.make(source, Layout(transpose, rows, cols))


def _as_it_lies(node: fx.Node, contracted_last: bool) -> tuple[fx.Node, bool]:
    """Return the tensor that an operand shows, and True if it lies so that what is contracted is its rows."""
    if (turned := Permutation.of(node)) is not None and is_transpose_of(node, turned.x):
        return turned.x, contracted_last
    return node, not contracted_last


def _groups(
    c: Compilation, node: fx.Node, contracted_last: bool, operand: Operand, offs: fx.Node, rows: int, like: fx.Node
) -> list[fx.Node]:
    """Return data, scale and ends of an operand [M, K] or [K, N] of which groups of K end at `offs`."""
    source, transpose = _as_it_lies(node, contracted_last)
    tokens = source if transpose else c.transposed(source, like)
    one_scale = operand.granularity == TENSOR.kind
    amax = c.emit(ops.amax, tokens, ROW.kind, *Layout(transpose=False).args, like=like) if one_scale else None
    cast = c.emit(ops.grouped_cast, tokens, offs, operand.format, operand.power_of_two, rows, amax, like=like)
    return [c.emit(operator.getitem, cast, part, like=like) for part in range(3)]


def _gathered(c: Compilation, weight: Gathered, transpose: bool, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return (data, scale) of a weight that arrived in FP8, contiguous along the contracted dimension."""
    data, scale = weight.payload, weight.scale
    if not transpose:
        return data, scale
    turned = [
        c.emit(aten.clone.default, c.emit(aten.permute.default, x, [1, 0], like=like), like=like, contiguous=True)
        for x in ([data, scale] if value(scale).dim() == 2 else [data])
    ]
    return turned[0], turned[-1] if len(turned) == 2 else scale


@dataclass(frozen=True)
class _Cast:
    """The markers of one operand, as they are emitted."""

    c: Compilation
    operand: Operand
    key: str
    like: fx.Node

    def make(self, source: fx.Node, layout: Layout) -> tuple[fx.Node, fx.Node]:
        """Return (data, scale) of `source` in `layout`; of a concatenation, part by part where the scales allow it."""
        parts = _parts(source, parse_granularity(self.operand.granularity), layout)
        if parts is None:
            scale = self._scale(self._amax(source, layout))
            return self._data(source, scale, layout), scale
        tensors, dim, combine = parts
        amaxes = [self._amax(t, layout) for t in tensors]
        if combine is None:  # one scale for all parts
            total = reduce(lambda a, b: self.c.emit(aten.maximum.default, a, b, like=self.like), amaxes)
            scale = self._scale(total)
            scales = [scale] * len(tensors)
        else:
            scales = [self._scale(a) for a in amaxes]
            scale = self.c.emit(aten.cat.default, scales, combine, like=self.like)
        data = [self._data(t, s, layout) for t, s in zip(tensors, scales, strict=True)]
        return self.c.emit(aten.cat.default, data, dim, like=self.like), scale

    def _amax(self, source: fx.Node, layout: Layout) -> fx.Node:
        return self.c.emit(ops.amax, source, self.operand.granularity, *layout.args, like=self.like)

    def _scale(self, amax: fx.Node) -> fx.Node:
        o = self.operand
        if not o.history:
            return self.c.emit(ops.scale, amax, o.format, o.power_of_two, like=self.like)
        scale = self.c.emit(
            ops.delayed_scale, amax, self.key, o.format, o.history, o.margin, o.power_of_two, like=self.like
        )
        if "recompute" in scale.meta:  # in a checkpointed region: computed again, it would be recorded again
            scale.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return scale

    def _data(self, source: fx.Node, scale: fx.Node, layout: Layout) -> fx.Node:
        o = self.operand
        return self.c.emit(ops.quantize, source, scale, o.format, o.granularity, *layout.args, like=self.like)


def _parts(source: fx.Node, granularity: Granularity, layout: Layout) -> tuple[list[fx.Node], int, int | None] | None:
    """Return the parts of a 2-D concatenation, the dimension of the data they lie along, and that of their scales
    (None: one scale for all); None where it must be cast as a whole."""
    cat = Concatenation.of(source)
    if cat is None or value(source).dim() != 2:
        return None
    tensors, along = cat.pieces, cat.dim
    dim = 1 - along if layout.transpose else along
    if (layout.row_multiple, layout.col_multiple)[dim] != 1:  # zeros would come between the parts
        return None
    if any(value(t).dtype != value(source).dtype for t in tensors):
        return None
    if granularity.kind == "tensor" or (granularity.kind == "row" and dim == 1):
        return tensors, dim, None
    size = 1 if granularity.kind == "row" or (granularity.kind == "group" and dim == 0) else granularity.size
    whole = all(isinstance(n := value(t).shape[along], int) and n % size == 0 for t in tensors)
    return (tensors, dim, dim) if whole else None
