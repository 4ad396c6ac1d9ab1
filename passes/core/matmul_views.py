"""Typed views of matmuls and convolutions, as `passes/core/node_views.py` has them of other nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.node_views import NodeView, argument, first_input

aten = torch.ops.aten


class Product(NodeView):
    """A matmul of two operands and nothing else: `mm`, `bmm`, or `_grouped_mm`."""

    TARGETS = frozenset({aten.mm.default, aten.bmm.default, aten._grouped_mm.default})

    @property
    def left(self) -> fx.Node:
        """The left operand, [.., m, k]."""
        return first_input(self.node)

    @property
    def right(self) -> fx.Node:
        """The right operand, [.., k, n]."""
        return self._node("mat2")


class GroupedMM(Product):
    """`_grouped_mm`: each group of rows multiplied by itself."""

    TARGETS = frozenset({aten._grouped_mm.default})

    @property
    def offs(self) -> fx.Node | None:
        """The rows at which groups end, or None."""
        return self._optional("offs")


class Addmm(NodeView):
    """`addmm`: bias + left @ right."""

    TARGETS = frozenset({aten.addmm.default})

    @property
    def bias(self) -> fx.Node:
        """The summand."""
        return first_input(self.node)

    @property
    def left(self) -> fx.Node:
        """The left operand, [m, k]."""
        return self._node("mat1")

    @property
    def right(self) -> fx.Node:
        """The right operand, [k, n]."""
        return self._node("mat2")


class _Convolving(NodeView):
    """A convolution or its backward."""

    @property
    def input(self) -> fx.Node:
        """The images, [batch, channels, *pixels]."""
        return self._node("input")

    @property
    def weight(self) -> fx.Node:
        """The weight, [channels of the output, channels, *kernel]."""
        return self._node("weight")

    @property
    def stride(self) -> list[Any]:
        """The steps between patches."""
        return list(argument(self.node, "stride"))

    @property
    def padding(self) -> list[Any]:
        """The zeros around an image."""
        return list(argument(self.node, "padding"))

    @property
    def dilation(self) -> list[Any]:
        """The steps within a patch."""
        return list(argument(self.node, "dilation"))

    @property
    def is_transposed(self) -> bool:
        """True for a transposed convolution."""
        return bool(argument(self.node, "transposed"))

    @property
    def groups(self) -> int:
        """The number of groups of channels."""
        return argument(self.node, "groups")


class Convolution(_Convolving):
    """`convolution`."""

    TARGETS = frozenset({aten.convolution.default})

    @property
    def bias(self) -> fx.Node | None:
        """The bias, or None."""
        return self._optional("bias")


class ConvolutionBackward(_Convolving):
    """`convolution_backward`: gradients of input, weight and bias."""

    TARGETS = frozenset({aten.convolution_backward.default})

    @property
    def gradient(self) -> fx.Node:
        """The gradient of the output."""
        return self._node("grad_output")

    @property
    def wanted(self) -> list[bool]:
        """Three booleans: the gradients that are computed, of input, weight and bias."""
        return list(argument(self.node, "output_mask"))
