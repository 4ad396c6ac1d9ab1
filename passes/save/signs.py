"""Signs of values: what is known of them from the operators that made them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import VIEWS, aten, value
from fp8compile.passes.core.node_views import argument, first_input

DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
LEAST = 2.0**-8  # a constant that keeps a denominator from what rounding to FP8 does to small numbers
SAME_SIGN = {*VIEWS, *fusible.CONVERSIONS, aten.clone.default, aten.cat.default}


class Signs:
    """The signs of the values of one graph; answers are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, fx.Node], bool] = {}

    def is_positive(self, arg: Any) -> bool:
        """Return True if every element is known to lie above some constant that is not tiny."""
        if not isinstance(arg, fx.Node):
            return number(arg) >= LEAST
        return self._ask("positive", arg, self._positive)

    def is_never_negative(self, arg: Any) -> bool:
        """Return True if no element can be negative."""
        if not isinstance(arg, fx.Node):
            return number(arg) >= 0
        return self._ask("never negative", arg, self._never_negative)

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

    def _ask(self, question: str, node: fx.Node, rule: Callable[[fx.Node], bool]) -> bool:
        if (question, node) not in self._known:
            self._known[question, node] = node.op == "call_function" and rule(node)
        return self._known[question, node]

    def _positive(self, node: fx.Node) -> bool:
        target, args = node.target, node.args
        if target in SAME_SIGN or target in (aten.sqrt.default, aten.square.default):
            return all(map(self.is_positive, node.all_input_nodes))
        if target in fusible.CONSTANTS:
            return number(node) >= LEAST
        if target in (aten.add.Tensor, aten.add.Scalar) and "alpha" not in node.kwargs:
            return self._is_positive_sum(*args[:2]) or self._is_positive_sum(*args[1::-1])
        if target in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
            return any(map(self.is_positive, args))
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return all(map(self.is_positive, args[:2]))
        if target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            return self.is_positive(args[0])
        return False

    def _is_positive_sum(self, a: Any, b: Any) -> bool:
        """Return True if b keeps a + b from zero. A mean of rounded numbers is near the exact one: there any b does."""
        if not self.is_never_negative(a):
            return False
        return self.is_positive(b) or (isinstance(a, fx.Node) and bool(_averaged(a)) and number(b) > 0)

    def _never_negative(self, node: fx.Node) -> bool:
        target, args = node.target, node.args
        if target in SAME_SIGN or target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            return all(map(self.is_never_negative, node.all_input_nodes))
        if target in (aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.abs.default, aten.relu.default):
            return True
        if target in (aten.sqrt.default, aten.rsqrt.default, aten.square.default):
            return True
        if target is aten.pow.Tensor_Scalar:
            return argument(node, "exponent") in (2, 4) or self.is_never_negative(args[0])
        if target in (aten.mul.Tensor, aten.mul.Scalar) and args[0] is args[1]:
            return True
        if target in (aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, *DIVISIONS):
            return "alpha" not in node.kwargs and all(map(self.is_never_negative, args[:2]))
        if target in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
            return any(map(self.is_never_negative, args))
        if fusible.is_moment(node):
            return bool(args[1] == 0)
        return self.is_positive(node)


def number(arg: Any) -> float:
    """Return the number that an argument is; nan for anything else."""
    if isinstance(arg, fx.Node):
        constant = fusible.is_pointwise(arg) and arg.target in fusible.CONSTANTS
        return float(fusible.constant_of(arg)) if constant else math.nan
    return float(arg) if isinstance(arg, (int, float)) else math.nan


def _copied(node: fx.Node) -> fx.Node:
    """Return the node that `node` is a view, a copy or a conversion of."""
    while node.op == "call_function" and node.target in SAME_SIGN and node.target is not aten.cat.default:
        node = node.all_input_nodes[0]
    return node


def _averaged(node: fx.Node) -> list[fx.Node]:
    """Return the node that `node` is a mean of, in a list; [] if it is none.

    A mean may be a sum divided by a number, or the first result of a var_mean.
    """
    node = _copied(node)
    if node.target in (aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar):
        tensors = [a for a in node.all_input_nodes if value(a).dim() and math.isnan(number(a))]
        return _averaged(tensors[0]) if len(tensors) == 1 else []
    if fusible.is_moment(node) or "getitem" in str(node.target):
        node = first_input(node)
    means = (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, *fusible.MOMENTS)
    return [_copied(first_input(node))] if node.target in means else []


def _is_square(arg: Any) -> bool:
    """Return True if `arg` is the square of something that is no difference, where rounding would add up."""
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        return False
    if arg.target in SAME_SIGN:
        return _is_square(arg.args[0])
    squared = square_of(arg)
    if squared is not None:
        return not _is_difference(_copied(squared))
    if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = arg.args[:2]
        return (number(b) >= 0 and _is_square(a)) or (number(a) >= 0 and _is_square(b))
    return False


def square_of(node: fx.Node) -> fx.Node | None:
    """Return the node that `node` is the square of, if it is one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.mul.Tensor and argument(node, "other") is source:
        return source
    power = node.target is aten.pow.Tensor_Scalar and argument(node, "exponent") == 2
    return source if power or node.target is aten.square.default else None


def _is_difference(node: fx.Node) -> bool:
    """Return True if `node` is shifted by more than a bias."""
    if node.target in (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar):
        return True
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    sizes = [str(value(a).numel()) for a in node.args[:2] if isinstance(a, fx.Node)]
    return len(sizes) < 2 or sizes[0] == sizes[1] or "1" in sizes  # a bias is smaller
