"""Parts of a loss: what can be executed of what is made of logits, and of what.

A value has elements for rows and classes ("logits"), for rows ("row"), or is a "number". Only such operators take part
as do the same to every row, whatever the number of rows and classes: views, casts, arithmetic, reductions over classes,
and a choice of one class a row. Comparisons take no part, for random values would hardly ever meet what they compare
with: those of labels are masks, which are drawn; of values only ∞ is looked for, as a log-sum-exp does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Set
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Gather
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.core.fusible import CONVERSIONS
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.loss.loss_equivalence import MEANS, REDUCTIONS, SAME_ELEMENTS, SCATTERS, Leaf

ARITHMETIC = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
    aten.neg.default, aten.exp.default, aten.log.default, aten.tanh.default, aten.abs.default,
    aten.pow.Tensor_Scalar,
}  # fmt: skip
NEGATIONS: dict[Any, Any] = {aten.ne.Scalar: aten.eq.Scalar, aten.ne.Tensor: aten.eq.Tensor}
NOT = {aten.bitwise_not.default, aten.logical_not.default}


class NotFoundError(Exception):
    """The logits of a head cannot be given up, for this reason."""


def is_float(node: fx.Node) -> bool:
    """Return True if `node` is a tensor of floating-point numbers."""
    return is_tensor(node) and value(node).is_floating_point()


class Parts:
    """The values around the logits of one head. depending: what is computed from them."""

    def __init__(self, logits: fx.Node, depending: set[fx.Node]):
        self.logits, self.depending = logits, depending
        *rows, classes = value(logits).shape
        self.rows, self.classes = math.prod(rows), classes

    def kind(self, node: fx.Node) -> str:
        """Return what a tensor has elements for: "logits" (rows and classes), "row", "number", or "" (something
        else)."""
        if not is_tensor(node):
            return ""
        shape = value(node).shape
        count = str(math.prod(shape))
        if count == "1":
            return "number"
        if str(shape[-1]) == str(self.classes) and count == str(self.rows * self.classes):
            return "logits"
        return "row" if count == str(self.rows) else ""

    def can_run(self, node: fx.Node) -> bool:
        """Return True if `node` does the same to every row, as far as its operator and its own shapes tell."""
        if not self.kind(node) or node.op != "call_function":
            return False
        if node.target is aten.gather.default:
            return self.kind(node) == "row" and self._chooses(node)
        if node.target in SCATTERS:
            return self.kind(node) == "logits" and self._chooses(node)
        if node.target in fusible.CONSTANTS:
            filled = fusible.fill_of(node)
            return isinstance(filled, (int, float))
        if node.target in REDUCTIONS or node.target in MEANS:
            source = first_input(node)
            dims = [d % value(source).dim() for d in argument(node, "dim")]
            return self.kind(source) == "logits" and dims == [value(source).dim() - 1]
        if node.target in SAME_ELEMENTS:  # an expansion repeats rows over classes, not over other rows
            return self.kind(node) in ("logits", self.kind(node.all_input_nodes[0]))
        if not all(map(is_tensor, node.all_input_nodes)):
            return False  # a symbolic number
        if self.kind(node) == "logits" and any(self._lies_across(i) for i in node.all_input_nodes):
            return False
        if node.target is aten.eq.Scalar:
            return (
                self.kind(node) == "row" and is_float(node.all_input_nodes[0]) and math.isinf(argument(node, "other"))
            )
        return node.target in CONVERSIONS or node.target in ARITHMETIC or node.target is aten.where.self

    def is_fill(self, node: fx.Node) -> bool:
        """Return True if `node` is made of constants, and of labels."""
        if node.target in fusible.CONSTANTS:
            return self.can_run(node)
        if node.target not in SCATTERS and node.target not in SAME_ELEMENTS:
            return False
        sources = [i for i in node.all_input_nodes if is_float(i)]
        return bool(sources) and self.can_run(node) and all(map(self.is_fill, sources))

    def _chooses(self, node: fx.Node) -> bool:
        """Return True if a gather or scatter takes one class of every row."""
        call = Gather(node)
        x, index = value(call.x), value(call.index)
        wanted = [*x.shape[:-1], 1]
        return (
            self.kind(call.x) == "logits"
            and call.dim % x.dim() == x.dim() - 1
            and [str(n) for n in index.shape] == [str(n) for n in wanted]
        )

    def _lies_across(self, node: fx.Node) -> bool:
        """Return True if as many numbers as there are rows lie along the classes (of which there are then as many)."""
        return self.kind(node) == "row" and str(value(node).shape[-1]) != "1"


class Closure:
    """The values that must be computed for some others, each with its kind, in order; and the leaves it begins with.

    outside: nodes that are not followed to reductions over classes that are not among them. With all of backward, the
    numbers of rows that come back are leaves, whatever they have been computed from.
    """

    def __init__(self, parts: Parts, wanted: Iterable[fx.Node], outside: Set[fx.Node] = frozenset()):
        self.parts, self.outside = parts, outside
        self._inside: set[fx.Node] = set()
        self._of_logits: dict[fx.Node, bool] = {}
        self.leaves: dict[fx.Node, Leaf] = {}
        for node in wanted:
            self._include(node)
        self.inside = [(n, parts.kind(n)) for n in parts.logits.graph.nodes if n in self._inside]

    def _include(self, node: fx.Node) -> None:
        if node in self._inside or node in self.leaves or node is self.parts.logits:
            return
        if not self._is_inside(node):
            if self.parts.kind(node) != "row":
                what = "its logits meet" if self.parts.kind(node) == "logits" else "in its loss takes part"
                raise NotFoundError(f"{what} %{node.name} ({node.target})")
            self.leaves[node] = _leaf(node)
            return
        self._inside.add(node)
        for source in node.all_input_nodes:
            if is_tensor(source):
                self._include(source)

    def _is_inside(self, node: fx.Node) -> bool:
        if not self.parts.can_run(node):
            return False
        if self.parts.is_fill(node):
            return True
        if node not in self.parts.depending and not is_float(node):
            return False  # labels and masks are drawn
        return self.parts.kind(node) == "logits" or self._is_of_logits(node)

    def _is_of_logits(self, node: fx.Node) -> bool:
        """Return True if one number a row is made of classes, or by arithmetic with such."""
        if node not in self._of_logits:
            ends = node.target in REDUCTIONS or node.target in MEANS or node.target is aten.gather.default
            sources = [i for i in node.all_input_nodes if is_float(i)]
            if node in self.outside:
                sources = [i for i in sources if i in self.outside]
            self._of_logits[node] = self.parts.can_run(node) and (ends or any(map(self._is_of_logits, sources)))
        return self._of_logits[node]


def _leaf(node: fx.Node) -> Leaf:
    """Return what is drawn for `node`: the same for all that are computed alike, and the opposite for a mask's
    opposite."""
    if is_float(node):
        return Leaf(node, "float")
    if value(node).dtype is not torch.bool:
        return Leaf(_formula(node), "label")
    opposite = False
    while node.target in NOT or node.target in SAME_ELEMENTS:
        opposite ^= node.target in NOT
        node = node.all_input_nodes[0]
    if node.target in NEGATIONS:
        return Leaf((NEGATIONS[node.target], *map(_formula, node.args)), "mask", not opposite)
    return Leaf(_formula(node), "mask", opposite)


def _is_random(node: fx.Node) -> bool:
    return "rand" in str(node.target) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _formula(arg: object) -> Hashable:
    """Return how `arg` is computed, views apart."""
    if isinstance(arg, (list, tuple)):
        return tuple(map(_formula, arg))
    if not isinstance(arg, fx.Node):
        return (type(arg), arg) if isinstance(arg, Hashable) else repr(arg)
    if arg.op != "call_function" or is_float(arg) or _is_random(arg):
        return arg
    if arg.target in SAME_ELEMENTS:
        return _formula(arg.all_input_nodes[0])
    return (arg.target, *map(_formula, arg.args), *((name, _formula(x)) for name, x in sorted(arg.kwargs.items())))
