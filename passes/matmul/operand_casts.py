"""Operand casts: the markers that make codes and scales of one operand of a matmul.

Each operand is cast into the layout in which the contracted dimension is contiguous: from the tensor that the graph
has, or transposed on the way. A concatenation is cast part by part into one buffer. What is to become a multiple of
some number is filled up with zeros. A weight that arrived in FP8 is taken as it is
(`passes/matmul/gathered_weights.py`).

Experts have casts of their own. Groups of tokens that are contracted (grad_weight) are cast by one operator, for only
the data knows where they end. Scales of "tensors" are those of an expert's tokens, or of its weight: each is made of
amaxes of rows, which output and grad_input find anyway.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import reduce

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.formats import E4M3, ROW, TENSOR, Granularity, parse_granularity, round_up
from fp8compile.passes.core.aten_views import Concatenation, Permutation
from fp8compile.passes.core.compilation import Compilation, aten, is_transpose_of, value
from fp8compile.passes.matmul.gathered_weights import Gathered, gathered
from fp8compile.plan.rows import Operand


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


def cast_operand(
    c: Compilation,
    node: fx.Node,
    contracted_last: bool,
    operand: Operand,
    key: str,
    rows: int,
    cols: int,
    like: fx.Node,
    of_experts: bool = False,
) -> tuple[fx.Node, fx.Node]:
    """Return (data, scale) of a left operand [M, K] or a right operand [K, N], as the matmul wants them; of_experts: of
    one whose scales are those of rows, whatever it says."""
    source, transpose = _as_it_lies(node, contracted_last)
    weight = gathered(source)
    if operand.gathered and weight is not None:
        return _gathered(c, weight, transpose, like)
    layout = Layout(transpose, rows, cols)
    if not of_experts:
        return _Cast(c, operand, key, like).make(source, layout)
    cast = _Cast(c, replace(operand, granularity=ROW.kind), key, like)
    has_one_each = operand.granularity == TENSOR.kind and all(isinstance(n, int) for n in value(source).shape)
    return _cast_experts(cast, source, layout) if has_one_each else cast.make(source, layout)


def _cast_experts(cast: _Cast, source: fx.Node, layout: Layout) -> tuple[fx.Node, fx.Node]:
    """Return (data, scale) of experts' weights, by rows: all rows of an expert have one scale, of the amaxes of rows
    that `output` finds, which lie across these."""
    c, like = cast.c, cast.like
    across = Layout(not layout.transpose)
    amax = c.emit(aten.amax.default, cast.amax(source, across), [1], True, like=like)
    width = round_up(value(source).shape[2 if layout.transpose else 1], layout.row_multiple)
    spread = c.emit(aten.expand.default, amax, [-1, width, 1], like=like)
    scale = cast.scale(c.emit(aten.clone.default, spread, like=like, contiguous=True))
    return cast.data(source, scale, layout), scale


def cast_groups(
    c: Compilation, node: fx.Node, contracted_last: bool, operand: Operand, offs: fx.Node, rows: int, like: fx.Node
) -> list[fx.Node]:
    """Return data, scale and ends of an operand [M, K] or [K, N] of which groups of K end at `offs`."""
    source, transpose = _as_it_lies(node, contracted_last)
    tokens = source if transpose else c.transposed(source, like)
    amax = _amax_of_tokens(c, tokens, like) if operand.granularity == TENSOR.kind else None
    cast = c.emit(ops.grouped_cast, tokens, offs, operand.format, operand.power_of_two, rows, amax, like=like)
    return [c.emit(operator.getitem, cast, part, like=like) for part in range(3)]


def _amax_of_tokens(c: Compilation, tokens: fx.Node, like: fx.Node) -> fx.Node:
    """Return the amaxes of rows as a cast by rows takes them, of each part of a concatenation."""
    cast, layout = _Cast(c, Operand(E4M3.name, ROW.kind), "", like), Layout(transpose=False)
    parts = _parts(tokens, ROW, layout)
    if parts is None or parts[1] == 0:
        return cast.amax(tokens, layout)
    return cast.common_amax(parts[0], layout)


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


def _as_it_lies(node: fx.Node, contracted_last: bool) -> tuple[fx.Node, bool]:
    """Return the tensor that an operand shows, and True if it lies so that what is contracted is its rows."""
    if (turned := Permutation.of(node)) is not None and is_transpose_of(node, turned.x):
        return turned.x, contracted_last
    return node, not contracted_last


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
            scale = self.scale(self.amax(source, layout))
            return self.data(source, scale, layout), scale
        tensors, dim, combine = parts
        if combine is None:  # one scale for all parts
            scale = self.scale(self.common_amax(tensors, layout))
            scales = [scale] * len(tensors)
        else:
            scales = [self.scale(self.amax(t, layout)) for t in tensors]
            scale = self.c.emit(aten.cat.default, scales, combine, like=self.like)
        data = [self.data(t, s, layout) for t, s in zip(tensors, scales, strict=True)]
        return self.c.emit(aten.cat.default, data, dim, like=self.like), scale

    def common_amax(self, parts: list[fx.Node], layout: Layout) -> fx.Node:
        """Return the largest amaxes of several tensors."""
        amaxes = [self.amax(part, layout) for part in parts]
        return reduce(lambda a, b: self.c.emit(aten.maximum.default, a, b, like=self.like), amaxes)

    def amax(self, source: fx.Node, layout: Layout) -> fx.Node:
        """Return the amaxes of a tensor."""
        return self.c.emit(ops.amax, source, self.operand.granularity, *layout.args, like=self.like)

    def scale(self, amax: fx.Node) -> fx.Node:
        """Return the scale for an amax."""
        o = self.operand
        if not o.history:
            return self.c.emit(ops.scale, amax, o.format, o.power_of_two, like=self.like)
        scale = self.c.emit(
            ops.delayed_scale, amax, self.key, o.format, o.history, o.margin, o.power_of_two, like=self.like
        )
        if "recompute" in scale.meta:  # in a checkpointed region: computed again, it would be recorded again
            scale.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return scale

    def data(self, source: fx.Node, scale: fx.Node, layout: Layout) -> fx.Node:
        """Return the codes of a tensor."""
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
