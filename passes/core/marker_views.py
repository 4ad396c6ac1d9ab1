"""Read the arguments of markers, the `fp8::` operators that passes insert, by name and type.

cast = Quantize.of(node)              None if `node` is no such call
if cast and cast.granularity == "tensor":
    ... cast.x, cast.scale
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.passes.core.node_views import Getitem, NodeView, argument

aten = torch.ops.aten


class _Oriented(NodeView):
    """A marker that reads `x`, or its transpose, padded to multiples of rows and columns."""

    @property
    def x(self) -> fx.Node:
        """The tensor that is cast, or of which the amax is."""
        return self._node("x")

    @property
    def granularity(self) -> str:
        """The granularity of the scale: "tensor", "row", "group(128)", "block(128)"."""
        return self._text("granularity")

    @property
    def transpose(self) -> bool:
        """True if rows and columns of `x` change places."""
        return bool(argument(self.node, "transpose"))

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which rows and columns become multiples, filled with zeros."""
        return argument(self.node, "row_multiple"), argument(self.node, "col_multiple")


class Amax(_Oriented):
    """`fp8::amax`."""

    TARGETS = frozenset({ops.amax})


class Quantize(_Oriented):
    """`fp8::quantize`."""

    TARGETS = frozenset({ops.quantize})

    @property
    def scale(self) -> fx.Node:
        """The scale, FP32."""
        return self._node("scale")

    @property
    def format(self) -> str:
        """The format of the codes: "e4m3", "e5m2"."""
        return self._text("format")


class Dequantize(NodeView):
    """`fp8::dequantize`."""

    TARGETS = frozenset({ops.dequantize})

    @property
    def data(self) -> fx.Node:
        """The codes."""
        return self._node("data")

    @property
    def scale(self) -> fx.Node:
        """The scale, FP32."""
        return self._node("scale")

    @property
    def granularity(self) -> str:
        """The granularity of the scale."""
        return self._text("granularity")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return argument(self.node, "dtype")


class Scale(NodeView):
    """`fp8::scale` or `fp8::delayed_scale`: a scale made of an amax."""

    TARGETS = frozenset({ops.scale, ops.delayed_scale})

    @property
    def amax(self) -> fx.Node:
        """The amax."""
        return self._node("amax")

    @property
    def format(self) -> str:
        """The format for which the scale is."""
        return self._text("format")

    @property
    def power_of_two(self) -> bool:
        """True if the scale is rounded up to a power of two."""
        return bool(argument(self.node, "power_of_two"))

    @property
    def is_delayed(self) -> bool:
        """True if the scale comes from a history of amaxes."""
        return self.node.target is ops.delayed_scale

    @property
    def history(self) -> int:
        """The number of steps whose amaxes a delayed scale is made of; 0 for another scale."""
        return argument(self.node, "history") if self.is_delayed else 0


class ScaledMM(NodeView):
    """`fp8::scaled_mm`: (a · scale_a) @ (b · scale_b)ᵀ + bias."""

    TARGETS = frozenset({ops.scaled_mm})

    @property
    def a(self) -> fx.Node:
        """The codes of the left operand, [m, k]."""
        return self._node("a")

    @property
    def scale_a(self) -> fx.Node:
        """The scale of the left operand."""
        return self._node("scale_a")

    @property
    def granularity_a(self) -> str:
        """The granularity of the left operand's scale."""
        return self._text("granularity_a")

    @property
    def b(self) -> fx.Node:
        """The codes of the right operand, [n, k]."""
        return self._node("b")

    @property
    def scale_b(self) -> fx.Node:
        """The scale of the right operand."""
        return self._node("scale_b")

    @property
    def granularity_b(self) -> str:
        """The granularity of the right operand's scale."""
        return self._text("granularity_b")

    @property
    def bias(self) -> fx.Node | None:
        """The bias, or None."""
        return self._optional("bias")

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return argument(self.node, "out_dtype")

    @property
    def fast_accumulation(self) -> bool:
        """True if partial sums stay in the matmul unit's own precision."""
        return bool(argument(self.node, "fast_accumulation"))

    @property
    def offs(self) -> fx.Node | None:
        """The rows at which the groups of a grouped matmul end, or None."""
        return self._optional("offs")


class GroupedCast(NodeView):
    """`fp8::grouped_cast`: groups of rows, cast and transposed for a matmul that contracts the rows of each."""

    TARGETS = frozenset({ops.grouped_cast})

    @property
    def x(self) -> fx.Node:
        """The tensor that is cast, [tokens, columns]."""
        return self._node("x")

    @property
    def offs(self) -> fx.Node:
        """The rows at which its groups end."""
        return self._node("offs")

    @property
    def format(self) -> str:
        """The format of the codes."""
        return self._text("format")

    @property
    def amax(self) -> fx.Node | None:
        """The amaxes of rows, of which a group has one scale; or None: a scale a column."""
        return self._optional("amax")

    @property
    def index(self) -> fx.Node | None:
        """The rows of x that are cast, or None: all, as they lie."""
        return self._optional("index")


class GroupedPart(NodeView):
    """A result of `fp8::grouped_cast`: codes, scales, or the columns at which groups of codes end."""

    TARGETS = Getitem.TARGETS

    @classmethod
    def of(cls, node: object) -> GroupedPart | None:
        """Return the view of `node`, or None if it is a result of anything else."""
        part = Getitem.of(node)
        return cls(part.node) if part is not None and part.source.target is ops.grouped_cast else None

    @property
    def cast(self) -> GroupedCast:
        """The cast."""
        return GroupedCast(Getitem(self.node).source)

    @property
    def is_payload(self) -> bool:
        """True for the codes."""
        return Getitem(self.node).index == 0


class RegionCall(NodeView):
    """`fp8::region`: a generated kernel, which gives its buffers."""

    TARGETS = frozenset({ops.region})

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensors that the kernel reads."""
        return list(argument(self.node, "inputs"))

    @property
    def sizes(self) -> list[Any]:
        """Sizes that change from call to call: numbers or nodes."""
        return list(argument(self.node, "sizes"))

    @property
    def spec(self) -> str:
        """The region as JSON (`kernels/codegen/spec/region.py`)."""
        return self._text("spec")

    @property
    def schedule(self) -> str:
        """The tiling as JSON (`kernels/codegen/schedule/tiling.py`)."""
        return self._text("schedule")


def cast_marker(node: fx.Node) -> Amax | Quantize:
    """Return the view of a node that is an amax or a quantize."""
    found = Amax.of(node) or Quantize.of(node)
    assert found is not None, f"{node.format_node()} is neither an amax nor a quantize"
    return found


def is_amax(node: fx.Node) -> bool:
    """Return True for amaxes, and for the largest of several or along a dimension."""
    if node.target in (aten.amax.default, aten.maximum.default):
        return all(map(is_amax, node.all_input_nodes))
    return node.target is ops.amax


def is_amax_of_tensor(node: object) -> bool:
    """Return True for the amax of a whole tensor."""
    amax = Amax.of(node)
    return amax is not None and amax.granularity == "tensor"
