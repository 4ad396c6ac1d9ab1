"""Sensitive values: those that backward must not see rounded to FP8, because something small in them decides much.

    exp(x), sin(x)      a relative error of x is an absolute one of the exponent: softmax of a rounded logit is another
    a / x, log(x)       what underflows to zero becomes inf
    x > t, x == y       rounding turns the answer (x > 0 survives: rounding keeps the sign)
    floor(x), topk(x)   likewise

The reason runs up from such an operator through everything that backward may compute again. Harmless forms are known:
1 / (1 + exp(x)) and log1p(exp(x)) are bounded, and so is exp of a product that cannot be positive; a denominator with a
positive constant in it cannot become zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8compile.passes import fusible
from fp8compile.passes.compilation import VIEWS, aten, is_tensor, value

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
SAME_SIGN = {*VIEWS, *fusible.CONVERSIONS, aten.clone.default, aten.cat.default}


def find_sensitive(graph: fx.Graph, may_run_again: Callable[[fx.Node], bool]) -> dict[fx.Node, str]:
    """For each sensitive value the reason. `may_run_again`: whether backward may compute a node again."""
    found: dict[fx.Node, str] = {}
    signs = Signs()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        why = _why_sensitive(node, signs)
        for source in why:
            found.setdefault(source, why[source])
        if node in found and may_run_again(node):
            for source in node.all_input_nodes:
                found.setdefault(source, found[node])
    return {node: why for node, why in found.items() if _is_float(node)}


def _why_sensitive(node: fx.Node, signs: Signs) -> dict[fx.Node, str]:
    """The inputs that `node` reads with more care than FP8 takes, and why."""
    target = node.target
    sources = [a for a in node.all_input_nodes if _is_float(a)]
    if not sources:
        return {}
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
    return any(not d.is_floating_point and d != torch.bool and not d.is_complex for d in made) and not any(
        word in str(node.target) for word in ("attention", "fp8.", "empty", "full", "inductor_")
    )


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
        return float(fusible.constant_of(arg)) if constant else _NAN
    return float(arg) if isinstance(arg, (int, float)) else _NAN


def _is_square(arg: Any) -> bool:
    """Whether `arg` is the square of something that is no difference of two tensors, where rounding would add up."""
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        return False
    if arg.target in SAME_SIGN:
        return _is_square(arg.args[0])
    if arg.target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = arg.args[:2]
        squared = a if a is b else None
        if squared is None:
            return (_number(b) >= 0 and _is_square(a)) or (_number(a) >= 0 and _is_square(b))
    elif arg.target is aten.square.default or (arg.target is aten.pow.Tensor_Scalar and arg.args[1] == 2):
        squared = arg.args[0]
    else:
        return False
    while isinstance(squared, fx.Node) and squared.target in SAME_SIGN:
        squared = squared.args[0]
    return isinstance(squared, fx.Node) and not _is_difference(squared)


def _is_difference(node: fx.Node) -> bool:
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    sizes = [value(a).numel() for a in node.args[:2] if isinstance(a, fx.Node)]
    return len(sizes) == 2 and str(sizes[0]) == str(sizes[1])  # a bias is smaller


_NAN = float("nan")


class Signs:
    """What is known of the sign of values, from the operators that made them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, fx.Node], bool] = {}

    def is_positive(self, arg: Any) -> bool:
        """Whether every element is known to lie above some positive constant."""
        if not isinstance(arg, fx.Node):
            return _number(arg) > 0
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
            return _number(node) > 0
        if target in (aten.add.Tensor, aten.add.Scalar) and "alpha" not in node.kwargs:
            a, b = args[:2]
            return (self.is_positive(a) and self.is_never_negative(b)) or (
                self.is_positive(b) and self.is_never_negative(a)
            )
        if target in (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
            return any(map(self.is_positive, args))
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return all(map(self.is_positive, args[:2]))
        if target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            return self.is_positive(args[0])
        return False

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
