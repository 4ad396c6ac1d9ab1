"""Sensitive values: those that backward must not see rounded to FP8, because something small in them decides much.

    exp(x), sin(x)      a relative error of x is an absolute one of the exponent: softmax of a rounded logit is another
    attention(q, k)     likewise: exp(q·k + bias) beside the exact sum of forward is no softmax
    a / x, log(x)       what underflows to zero becomes inf
    x > t, x == y       rounding turns the answer (x > 0 survives: rounding keeps the sign)
    floor(x), topk(x)   likewise
    1 - x               what is left is all rounding where x is near one: a sigmoid, a tanh
    mylib.flash(x)      nobody knows: what `passes/core/operators.py` does not name may do any of these

The reason runs up from such an operator through everything that backward may compute again; that of a difference only
to copies and squares of what it is taken of, for what saturates (1 - sigmoid(x)) forgives its input. Harmless forms are
known: 1 / (1 + exp(x)) and log1p(exp(x)) are bounded, and so is exp of minus a square; a denominator with a constant in
it that is not tiny cannot become zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8compile.formats import FP8_DTYPES
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import VIEWS, aten, is_tensor, value

COMPARISONS = {
    aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor, aten.le.Scalar,
    aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
}  # fmt: skip
STEPS = {
    aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default, aten.frac.default,
    aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar, aten.fmod.Tensor,
}  # fmt: skip
PERIODIC = {aten.sin.default, aten.cos.default, aten.tan.default}
EXPONENTIALS = {aten.exp.default, aten.exp2.default, aten.expm1.default, aten.sinh.default, aten.cosh.default}
LOGARITHMS = {aten.log.default, aten.log2.default, aten.log10.default}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
QUERY_OR_KEY = "in the exponent of attention"
BIAS = "added in the exponent of attention"
LEAST = 2.0**-8  # a constant that keeps a denominator from what rounding to FP8 does to small numbers
SAME_SIGN = {*VIEWS, *fusible.CONVERSIONS, aten.clone.default, aten.cat.default}


def find_sensitive(
    graph: fx.Graph, may_run_again: Callable[[fx.Node], bool], is_backward: Callable[[fx.Node], bool]
) -> dict[fx.Node, str]:
    """For each sensitive value the reason. `may_run_again`: whether backward may compute a node of forward again."""
    found: dict[fx.Node, str] = {}
    differences: dict[fx.Node, str] = {}
    signs = Signs()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        for source, why in _why_sensitive(node, signs).items():
            found.setdefault(source, why)
        for source in _taken_off(node):
            differences.setdefault(source, "taken off a constant: near to it, only rounding would be left")
        if node in found and (may_run_again(node) or (is_backward(node) and _hands_on(node))):
            for source in node.all_input_nodes:
                found.setdefault(source, found[node])
        if node in differences and (node.target in SAME_SIGN or _square_of(node) is not None):
            for source in node.all_input_nodes:
                differences.setdefault(source, differences[node])
    return {node: why for node, why in {**differences, **found}.items() if _is_float(node)}


def _why_sensitive(node: fx.Node, signs: Signs) -> dict[fx.Node, str]:
    """The inputs that `node` reads with more care than FP8 takes, and why."""
    target = node.target
    sources = [a for a in node.all_input_nodes if _is_float(a)]
    if not sources:
        return {}
    if not operators.is_known(target):
        return _all(sources, f"read by {_called(node)}, which is not known to bear rounding")
    if operators.is_operator(target) and operators.name_of(target) in operators.PARTLY:
        return _of_partly(node, sources)
    if target in EXPONENTIALS:
        return {} if signs.is_never_positive(sources[0]) or _is_bounded(node) else _all(sources, "in an exponent")
    if target in PERIODIC:
        return _all(sources, "an angle")
    if target in LOGARITHMS or target is aten.rsqrt.default or target is aten.reciprocal.default:
        return {} if signs.is_positive(sources[0]) else _all(sources, f"{_name(node)} of what may round to zero")
    if target in DIVISIONS:
        below = node.args[1]
        if not isinstance(below, fx.Node) or not _is_float(below) or signs.is_positive(below):
            return {}
        return _all([below], "divided by, and may round to zero")
    if target is aten.pow.Tensor_Scalar and node.args[1] < 0:  # type: ignore[operator]
        return {} if signs.is_positive(sources[0]) else _all(sources, "divided by, and may round to zero")
    if target in COMPARISONS:
        return {} if _is_zero(node.args[1]) else _all(sources, "compared: rounding could turn the answer")
    if target in fusible.EQUALITIES or target in STEPS or _makes_integers(node):
        return _all(sources, f"read by {_name(node)}, whose answer rounding could turn")
    return {}


def _hands_on(node: fx.Node) -> bool:
    """Whether an error of what `node` reads is one of the same size of what it gives."""
    return fusible.is_pointwise(node) or operators.moves(node.target) or node.target is operator.getitem


def _of_partly(node: fx.Node, sources: list[fx.Node]) -> dict[fx.Node, str]:
    """The inputs of an attention, or of another operator that bears rounding of some inputs, that must be exact."""
    exact = [a for a in sources if a not in operators.bearing(node)]
    if not operators.is_attention(node.target):
        return _all(exact, f"read by {_name(node)} as more than a value")
    given = operators.arguments(node)
    exponent = (given.get("query"), given.get("key"))
    return {a: QUERY_OR_KEY if a in exponent else BIAS for a in exact}


def _called(node: fx.Node) -> str:
    """The name of an operator that nobody knows; of one that torch wraps, its own."""
    for a in node.args[:1]:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and operators.is_operator(a):
            return operators.shown(a)
    return operators.shown(node.target)


def _taken_off(node: fx.Node) -> list[fx.Node]:
    """What `node` takes off a constant."""
    if node.target is aten.rsub.Scalar:
        return [node.args[0]]  # type: ignore[list-item]
    if node.target not in (aten.sub.Tensor, aten.sub.Scalar, aten.add.Tensor, aten.add.Scalar):
        return []
    a, b = node.args[:2]
    if node.target in (aten.add.Tensor, aten.add.Scalar):  # 1 + (-x)
        negative = next((x for x in (a, b) if isinstance(x, fx.Node) and x.target is aten.neg.default), None)
        other = b if negative is a else a
        return [negative.args[0]] if negative is not None and _number(other) > 0 else []  # type: ignore[list-item]
    return [b] if isinstance(b, fx.Node) and _number(a) != 0 and not math.isnan(_number(a)) else []


def _copied(node: fx.Node) -> fx.Node:
    """What `node` is a view, a copy or a conversion of."""
    while node.op == "call_function" and node.target in SAME_SIGN and node.target is not aten.cat.default:
        node = node.all_input_nodes[0]
    return node


def _averaged(node: fx.Node) -> list[fx.Node]:
    """What `node` is a mean of, if it is one: a sum, perhaps divided by a number, or the mean of a var_mean."""
    node = _copied(node)
    if node.target in (aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar):
        tensors = [a for a in node.all_input_nodes if value(a).dim() and math.isnan(_number(a))]
        return _averaged(tensors[0]) if len(tensors) == 1 else []
    if fusible.is_moment(node) or "getitem" in str(node.target):
        node = node.args[0]  # type: ignore[assignment]
    means = (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, *fusible.MOMENTS)
    return [_copied(node.args[0])] if node.target in means else []  # type: ignore[arg-type]


def _all(sources: list[fx.Node], why: str) -> dict[fx.Node, str]:
    return dict.fromkeys(sources, why)


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _is_float(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).is_floating_point()


def _makes_integers(node: fx.Node) -> bool:
    """Whether `node` turns floats into indices: an argmax, a sort, a conversion."""
    val = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else [val]
    made = [v.dtype for v in vals if isinstance(v, torch.Tensor)]
    if node.target is aten.view.dtype and value(node.args[0]).dtype in FP8_DTYPES:  # type: ignore[arg-type]
        return False  # a payload as bytes
    if operators.name_of(node.target) in operators.CREATIONS or operators.shown(node.target).startswith("fp8."):
        return False
    return any(not d.is_floating_point and d != torch.bool and not d.is_complex for d in made)


def _is_zero(arg: Any) -> bool:
    if isinstance(arg, fx.Node):
        return arg.target in fusible.CONSTANTS and fusible.constant_of(arg) == 0
    return arg == 0


def _is_bounded(exponential: fx.Node) -> bool:
    """Whether all that is done with exp(x) is 1 / (1 + exp(x)), exp(x) / (1 + exp(x)) and log1p(exp(x))."""
    shifted = [u for u in exponential.users if u.target in (aten.add.Tensor, aten.add.Scalar) and _adds_positive(u)]
    for user in exponential.users:
        ratio = user.target in DIVISIONS and user.args[0] is exponential and user.args[1] in shifted
        if user not in shifted and user.target is not aten.log1p.default and not ratio:
            return False
    below = (aten.reciprocal.default, aten.log.default)
    return all(
        user.target in below or (user.target in DIVISIONS and user.args[1] is s) for s in shifted for user in s.users
    )


def _adds_positive(node: fx.Node) -> bool:
    return any(_number(a) > 0 for a in node.args)


def _number(arg: Any) -> float:
    """The number that an argument is; nan for anything else."""
    if isinstance(arg, fx.Node):
        constant = fusible.is_pointwise(arg) and arg.target in fusible.CONSTANTS
        return float(fusible.constant_of(arg)) if constant else math.nan
    return float(arg) if isinstance(arg, (int, float)) else math.nan


def _is_square(arg: Any) -> bool:
    """Whether `arg` is the square of something that is no difference, where rounding would add up."""
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        return False
    if arg.target in SAME_SIGN:
        return _is_square(arg.args[0])
    squared = _square_of(arg)
    if squared is not None:
        return not _is_difference(_copied(squared))
    if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = arg.args[:2]
        return (_number(b) >= 0 and _is_square(a)) or (_number(a) >= 0 and _is_square(b))
    return False


def _square_of(node: fx.Node) -> fx.Node | None:
    """What `node` is the square of, if it is one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.mul.Tensor and node.args[1] is source:
        return source
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    return source if power or node.target is aten.square.default else None


def _is_difference(node: fx.Node) -> bool:
    """Whether `node` is shifted by more than a bias."""
    if node.target in (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar):
        return True
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    sizes = [str(value(a).numel()) for a in node.args[:2] if isinstance(a, fx.Node)]
    return len(sizes) < 2 or sizes[0] == sizes[1] or "1" in sizes  # a bias is smaller


class Signs:
    """What is known of the sign of values, from the operators that made them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, fx.Node], bool] = {}

    def is_positive(self, arg: Any) -> bool:
        """Whether every element is known to lie above some constant that is not tiny."""
        if not isinstance(arg, fx.Node):
            return _number(arg) >= LEAST
        return self._ask("positive", arg, self._positive)

    def is_never_negative(self, arg: Any) -> bool:
        """Whether no element can be negative."""
        if not isinstance(arg, fx.Node):
            return _number(arg) >= 0
        return self._ask("never negative", arg, self._never_negative)

    def is_never_positive(self, arg: Any) -> bool:
        """Whether `arg` is minus a square, so that rounding what is squared leaves exp of it near: GELU's bell."""
        if not isinstance(arg, fx.Node) or arg.op != "call_function":
            return False
        if arg.target is aten.neg.default:
            return _is_square(arg.args[0])
        if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
            a, b = arg.args[:2]
            return (_number(b) <= 0 and _is_square(a)) or (_number(a) <= 0 and _is_square(b))
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
            return _number(node) >= LEAST
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
        """Whether b keeps a + b from zero. A mean of rounded numbers is near the exact one: there any b does."""
        if not self.is_never_negative(a):
            return False
        return self.is_positive(b) or (isinstance(a, fx.Node) and bool(_averaged(a)) and _number(b) > 0)

    def _never_negative(self, node: fx.Node) -> bool:
        target, args = node.target, node.args
        if target in SAME_SIGN or target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            return all(map(self.is_never_negative, node.all_input_nodes))
        if target in (aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.abs.default, aten.relu.default):
            return True
        if target in (aten.sqrt.default, aten.rsqrt.default, aten.square.default):
            return True
        if target is aten.pow.Tensor_Scalar:
            return bool(args[1] in (2, 4)) or self.is_never_negative(args[0])
        if target in (aten.mul.Tensor, aten.mul.Scalar) and args[0] is args[1]:
            return True
        if target in (aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, *DIVISIONS):
            return "alpha" not in node.kwargs and all(map(self.is_never_negative, args[:2]))
        if target in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
            return any(map(self.is_never_negative, args))
        if fusible.is_moment(node):
            return bool(args[1] == 0)
        return self.is_positive(node)
