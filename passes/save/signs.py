"""Signs of values: what is known of them from the operators that made them.

Operators that regions understand are written as operations (`passes/core/fusible.py`), whose ranges follow from the
rules of `kernels/codegen/spec/value_range.py`; reductions, views and powers have rules here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile.kernels.codegen.spec import value_range
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.reductions import REDUCTIONS
from fp8compile.kernels.codegen.spec.value_range import NEVER_NEGATIVE, UNKNOWN, Range
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import VIEWS, aten, value
from fp8compile.passes.core.node_views import Getitem, argument, first_input

DIVISIONS = fusible.overloads_of("div")
SAME_SIGN = {*VIEWS, *fusible.CONVERSIONS, aten.clone.default, aten.cat.default}
AVERAGES = {"row_mean": "row_sum"}  # what is known of a sum is known of a mean


class Signs:
    """The ranges of the values of one graph, as it is when this is made."""

    def __init__(self, graph: fx.Graph) -> None:
        self._known: dict[fx.Node, Range] = {}
        for node in graph.nodes:
            self._known[node] = self._range_of(node) if node.op == "call_function" else UNKNOWN

    def of(self, arg: Any) -> Range:
        """Return the range of a node, or of a number."""
        return self._known[arg] if isinstance(arg, fx.Node) else value_range.of_constant(number(arg))

    def is_positive(self, arg: Any) -> bool:
        """Return True if every element is known to lie above some constant that is not tiny."""
        return self.of(arg).positive

    def is_never_positive(self, arg: Any) -> bool:
        """Return True if `arg` is minus a square, so that rounding the squared leaves exp of it near: GELU's bell."""
        if not isinstance(arg, fx.Node) or arg.op != "call_function":
            return False
        if arg.target is aten.neg.default:
            return _is_square(arg.args[0])
        if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
            a, b = arg.args[:2]
            return (number(b) <= 0 and _is_square(a)) or (number(a) <= 0 and _is_square(b))
        return arg.target in SAME_SIGN and all(map(self.is_never_positive, arg.all_input_nodes))

    def _range_of(self, node: fx.Node) -> Range:
        target: Any = node.target
        if target in SAME_SIGN:
            return value_range.least_of([self.of(source) for source in node.all_input_nodes])
        if target in fusible.CONSTANTS:
            return value_range.of_constant(number(node))
        if target in fusible.REDUCTIONS:
            name = fusible.REDUCTIONS[target]
            return REDUCTIONS[AVERAGES.get(name, name)].range([self.of(first_input(node))], False)
        if target is aten.pow.Tensor_Scalar:
            return self._power(first_input(node), argument(node, "exponent"))
        if fusible.is_moment(node):
            return NEVER_NEGATIVE if Getitem(node).index == 0 else UNKNOWN
        rule = fusible.POINTWISE.get(target)
        found = UNKNOWN if rule is None else self._computed(node, rule)
        return replace(found, positive=found.positive or self._is_shifted_average(node))

    def _power(self, base: fx.Node, exponent: float) -> Range:
        if exponent in (2, 4):
            return NEVER_NEGATIVE
        return replace(value_range.total([self.of(base)], False), positive=False)

    def _computed(self, node: fx.Node, rule: fusible.Rule) -> Range:
        """Return the range of what `rule` writes for a node."""
        writer = _RangeWriter()
        numbers: dict[Any, int] = {}  # equal arguments are one value

        def written(arg: Any) -> int | None:
            if arg is not None and arg not in numbers:
                numbers[arg] = writer.add(self.of(arg))
            return None if arg is None else numbers[arg]

        kwargs = {k: a if k == "alpha" else written(a) for k, a in node.kwargs.items()}
        return writer.ranges[rule(writer, *map(written, node.args), **kwargs)]

    def _is_shifted_average(self, node: fx.Node) -> bool:
        """Return True if `node` adds a positive number to a mean that is never negative: a mean of rounded numbers is
        near the exact one, so that any number keeps the sum from zero."""
        if node.target not in (aten.add.Tensor, aten.add.Scalar) or "alpha" in node.kwargs:
            return False
        pairs = (node.args[:2], node.args[1::-1])
        return any(isinstance(a, fx.Node) and number(b) > 0 and self._is_average(a) for a, b in pairs)

    def _is_average(self, node: fx.Node) -> bool:
        return self.of(node).never_negative and bool(_averaged(node))


class _RangeWriter:
    """A writer that takes the operations of a rule, and has their ranges."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def add(self, x: Range) -> int:
        """Return the number of a value of this range."""
        self.ranges.append(x)
        return len(self.ranges) - 1

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """Return the number of a value computed from others."""
        equal = len(args) > 1 and len(set(args)) == 1
        return self.add(OPERATIONS[name].range([self.ranges[a] for a in args], equal))

    def constant(self, x: Any) -> int:
        """Return the number of a constant."""
        return self.add(value_range.of_constant(float(x)))


def number(arg: Any) -> float:
    """Return the number that an argument is; nan for anything else."""
    if isinstance(arg, fx.Node):
        constant = fusible.is_pointwise(arg) and arg.target in fusible.CONSTANTS
        return float(fusible.constant_of(arg)) if constant else math.nan
    return float(arg) if isinstance(arg, (int, float)) else math.nan


def copied(node: fx.Node) -> fx.Node:
    """Return the node that `node` is a view, a copy or a conversion of."""
    while node.op == "call_function" and node.target in SAME_SIGN and node.target is not aten.cat.default:
        node = node.all_input_nodes[0]
    return node


def _averaged(node: fx.Node) -> list[fx.Node]:
    """Return the node that `node` is a mean of, in a list; [] if it is none.

    A mean may be a sum divided by a number, or the first result of a var_mean.
    """
    node = copied(node)
    if node.target in (aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar):
        tensors = [a for a in node.all_input_nodes if value(a).dim() and math.isnan(number(a))]
        return _averaged(tensors[0]) if len(tensors) == 1 else []
    if fusible.is_moment(node) or "getitem" in str(node.target):
        node = first_input(node)
    means = (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, *fusible.MOMENTS)
    return [copied(first_input(node))] if node.target in means else []


def _is_square(arg: Any) -> bool:
    """Return True if `arg` is the square of something that is no difference, where rounding would add up."""
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        return False
    if arg.target in SAME_SIGN:
        return _is_square(arg.args[0])
    squared = square_of(arg)
    if squared is not None:
        return not _is_difference(copied(squared))
    if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = arg.args[:2]
        return (number(b) >= 0 and _is_square(a)) or (number(a) >= 0 and _is_square(b))
    return False


def square_of(node: fx.Node) -> fx.Node | None:
    """Return the node that `node` is the square of, if it is one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.mul.Tensor and node.args[1] is source:
        return source
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    return source if power or node.target is aten.square.default else None


def _is_difference(node: fx.Node) -> bool:
    """Return True if `node` is shifted by more than a bias."""
    if node.target in (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar):
        return True
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    sizes = [str(value(a).numel()) for a in node.args[:2] if isinstance(a, fx.Node)]
    return len(sizes) < 2 or sizes[0] == sizes[1] or "1" in sizes  # a bias is smaller
