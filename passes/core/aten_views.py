"""Read the arguments of some operators of aten by their names: those that rearrange, choose or add up elements."""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.core.node_views import NodeView, argument, first_input

aten = torch.ops.aten


class Concatenation(NodeView):
    """`cat`."""

    TARGETS = frozenset({aten.cat.default})

    @property
    def pieces(self) -> list[fx.Node]:
        """The tensors that lie one behind the other."""
        return list(argument(self.node, "tensors"))

    @property
    def dim(self) -> int:
        """The dimension along which they do, counted from the first."""
        return argument(self.node, "dim") % self.node.meta["val"].dim()


class Permutation(NodeView):
    """A view whose dimensions are those of its input in another order."""

    TARGETS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})

    @property
    def x(self) -> fx.Node:
        """The tensor that is viewed."""
        return first_input(self.node)

    @property
    def dims(self) -> list[int]:
        """For each dimension of the view that of the input, counted from the first."""
        n = self.x.meta["val"].dim()
        if self.node.target is aten.permute.default:
            return [d % n for d in argument(self.node, "dims")]
        dims = list(range(n))
        whole = self.node.target is aten.t.default
        a, b = (0, 1) if whole else (argument(self.node, "dim0"), argument(self.node, "dim1"))
        if n >= 2:
            dims[a], dims[b] = dims[b], dims[a]
        return dims


class Slice(NodeView):
    """`slice`: rows of a tensor, along any dimension."""

    TARGETS = frozenset({aten.slice.Tensor})

    @property
    def x(self) -> fx.Node:
        """The tensor of which a part is taken."""
        return first_input(self.node)

    @property
    def dim(self) -> int:
        """The dimension, counted from the first."""
        return argument(self.node, "dim") % self.x.meta["val"].dim()


class Gather(NodeView):
    """`gather`, or a scatter: elements of a tensor that are chosen by an index along one dimension."""

    TARGETS = frozenset({aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default})

    @property
    def x(self) -> fx.Node:
        """The tensor whose elements are chosen."""
        return first_input(self.node)

    @property
    def dim(self) -> int:
        """The dimension, as it was given."""
        return argument(self.node, "dim")

    @property
    def index(self) -> fx.Node:
        """The positions of the elements that are chosen."""
        return self._node("index")


class Sum(NodeView):
    """`sum` over some dimensions."""

    TARGETS = frozenset({aten.sum.dim_IntList})

    @property
    def x(self) -> fx.Node:
        """The tensor that is summed."""
        return first_input(self.node)

    @property
    def dims(self) -> list[int] | None:
        """The dimensions, as they were given; None for all."""
        return argument(self.node, "dim")

    @property
    def keeps_dims(self) -> bool:
        """True if the dimensions stay, with one element each."""
        return bool(argument(self.node, "keepdim"))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that is asked for."""
        return argument(self.node, "dtype")
