"""Rounding hazards: values that backward must not see rounded to FP8, because something small in them decides much.

    exp(x), sin(x)      a relative error of x is an absolute one of the exponent: softmax of a rounded logit is another
    attention(q, k)     likewise: exp(q·k + bias) beside the exact sum of forward is no softmax
    attention's output  backward takes it off v, row by row: an error there adds the mean of all keys to q's gradient
    a / x, log(x)       what underflows to zero becomes inf
    x > t, x == y       rounding turns the answer (x > 0 survives: rounding keeps the sign)
    floor(x), topk(x)   likewise
    1 - x               what is left is all rounding where x is near one: a sigmoid, a tanh
    x - y               likewise where the two are near: tokens beside their neighbours, a prediction beside its target
    exp(x) * exp(y)     what is small in one is multiplied by what is large in the other (`passes/save/wide_ranges.py`)
    jvp(f, x)           what the model itself differentiates: its primals, tangents and inner gradients
    mylib.flash(x)      nobody knows: what `passes/core/operators.py` does not name may do any of these

The reason runs up from such an operator through everything that backward may compute again; that of a difference, or of
a wide range, only to copies and squares, for what saturates (1 - sigmoid(x)) forgives its input. Harmless forms are
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
from fp8compile.kernels.codegen.spec.operation import Hazard
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.core.derivatives import is_differentiated
from fp8compile.passes.core.node_views import argument, first_input
from fp8compile.passes.save.signs import DIVISIONS, SAME_SIGN, Signs, number, square_of
from fp8compile.passes.save.wide_ranges import find_wide_factors
from fp8compile.plan.reasons import DIFFERENTIATED, Reason, Why

QUERY_OR_KEY = Why(Reason.QUERY_OR_KEY, "in the exponent of attention")
OUTPUT = Why(Reason.ATTENTION_OUTPUT, "the output of attention: backward would multiply its rounding by keys")
BIAS = Why(Reason.ATTENTION_BIAS, "added in the exponent of attention")
EXPONENT = Why(Reason.EXPONENT, "in an exponent")
ANGLE = Why(Reason.ANGLE, "an angle")
DIVISOR = Why(Reason.MAY_BE_ZERO, "divided by, and may round to zero")
COMPARED = Why(Reason.COMPARED, "compared: rounding could turn the answer")
CANCELLATION = Why(Reason.CANCELLATION, "taken off a constant: near to it, only rounding would be left")
DIFFERENCE = Why(Reason.CANCELLATION, "taken off another tensor: where they are near, only rounding would be left")
RANGE = Why(
    Reason.WIDE_RANGE, "an exponential that is multiplied by another: small numbers in it count, and would be zeros"
)
Hazards = dict[fx.Node, Why]


def find_hazards(
    graph: fx.Graph, may_run_again: Callable[[fx.Node], bool], is_backward: Callable[[fx.Node], bool]
) -> Hazards:
    """Return the values that must not be rounded, each with its reason. may_run_again: True for a node of forward that
    backward may compute again."""
    found: Hazards = {}
    exact_alone: Hazards = dict.fromkeys(find_wide_factors(graph, _is_bounded, is_backward), RANGE)  # not their inputs
    signs = Signs(graph)
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        for source, why in _hazards_of(node, signs).items():
            found.setdefault(source, why)
        if is_differentiated(node):
            found.setdefault(node, DIFFERENTIATED)
        for source, why in _differences_of(node).items():
            exact_alone.setdefault(source, why)
        if node in found and (may_run_again(node) or (is_backward(node) and _hands_on(node))):
            for source in node.all_input_nodes:
                found.setdefault(source, found[node])
        if node in exact_alone and _is_copy_or_square(node):
            for source in node.all_input_nodes:
                exact_alone.setdefault(source, exact_alone[node])
    return {node: why for node, why in {**exact_alone, **found}.items() if _is_float(node)}


def _hazards_of(node: fx.Node, signs: Signs) -> Hazards:
    """Return the inputs that `node` reads with more care than FP8 takes, and why."""
    target = node.target
    sources = [a for a in node.all_input_nodes if _is_float(a)]
    if not sources:
        return {}
    if is_differentiated(node):
        return _all(sources, DIFFERENTIATED)
    if not operators.is_known(target):
        return _all(
            sources, Why(Reason.UNKNOWN_OPERATOR, f"read by {_called(node)}, which is not known to bear rounding")
        )
    if operators.is_operator(target) and operators.name_of(target) in operators.PARTLY:
        return _of_partly(node, sources)
    if target is aten.pow.Tensor_Scalar and argument(node, "exponent") < 0:
        return {} if signs.is_positive(sources[0]) else _all(sources, DIVISOR)
    if target in (aten.pow.Scalar, aten.pow.Tensor_Tensor):
        return _all([a for a in sources if a is argument(node, "exponent")], EXPONENT)
    return _of_hazard(node, operators.hazard_of(target), sources, signs)


def _of_hazard(node: fx.Node, hazard: Hazard | None, sources: list[fx.Node], signs: Signs) -> Hazards:
    """Return the inputs of a steep operator, or of one that makes integers, that must be exact, and why."""
    if hazard is Hazard.EXPONENT:
        return {} if signs.is_never_positive(sources[0]) or _is_bounded(node) else _all(sources, EXPONENT)
    if hazard is Hazard.ANGLE:
        return _all(sources, ANGLE)
    if hazard is Hazard.ZERO:
        why = Why(Reason.MAY_BE_ZERO, f"{_name(node)} of what may round to zero")
        return {} if signs.is_positive(sources[0]) else _all(sources, why)
    if hazard is Hazard.DENOMINATOR:
        below = argument(node, "other")
        if not isinstance(below, fx.Node) or not _is_float(below) or signs.is_positive(below):
            return {}
        return _all([below], DIVISOR)
    if hazard is Hazard.COMPARISON:
        return {} if _is_zero(argument(node, "other")) else _all(sources, COMPARED)
    if hazard is Hazard.STEP or _makes_integers(node):
        return _all(sources, Why(Reason.STEP, f"read by {_name(node)}, whose answer rounding could turn"))
    return {}


def _hands_on(node: fx.Node) -> bool:
    """Return True if an error of an input of `node` is one of the same size of its result."""
    return fusible.is_pointwise(node) or operators.moves(node.target) or node.target is operator.getitem


def _is_copy_or_square(node: fx.Node) -> bool:
    """Return True if what `node` gives are elements of its input, or their squares."""
    is_copy = node.target in SAME_SIGN or node.target is operator.getitem or operators.moves(node.target)
    return is_copy or square_of(node) is not None


def _of_partly(node: fx.Node, sources: list[fx.Node]) -> Hazards:
    """Return the inputs that must be exact, of an operator that bears rounding of others, as attention does."""
    exact = [a for a in sources if a not in operators.bearing(node)]
    if not operators.is_attention(node.target):
        return _all(exact, Why(Reason.MORE_THAN_VALUE, f"read by {_name(node)} as more than a value"))
    given = operators.arguments(node)
    whys = {"out": OUTPUT, "query": QUERY_OR_KEY, "key": QUERY_OR_KEY}
    found = {a: whys[name] for name, a in given.items() if name in whys and isinstance(a, fx.Node)}
    return {a: found.get(a, BIAS) for a in exact}


def _called(node: fx.Node) -> str:
    """Return the name of an operator that nobody knows; of one that torch wraps, its own."""
    for a in node.args[:1]:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and operators.is_operator(a):
            return operators.shown(a)
    return operators.shown(node.target)


def _differences_of(node: fx.Node) -> Hazards:
    """Return the values of which `node` is a difference that may be small beside them."""
    if (alone := _taken_off(node)) or node.target is not aten.sub.Tensor:
        return _all(alone, CANCELLATION)
    a, b = node.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and is_tensor(a) and is_tensor(b)) or a is b:
        return {}
    # a mean, or a bias, is smaller than what it is taken off
    whole = [list(map(str, value(x).shape)) == list(map(str, value(node).shape)) for x in (a, b)]
    is_smooth = _computed_from(a) == _computed_from(b)  # one function of what is rounded once
    return _all([a, b], DIFFERENCE) if (all(whole) or not any(whole)) and not is_smooth else {}


def _computed_from(node: fx.Node) -> set[fx.Node]:
    """Return the values from which `node` is computed element by element."""
    found, pending = set[fx.Node](), [node]
    while pending:
        x = pending.pop()
        tensors = [a for a in x.all_input_nodes if is_tensor(a) and x.target not in fusible.CONSTANTS]
        if fusible.is_pointwise(x) and tensors:
            pending += tensors
        elif not (fusible.is_pointwise(x) and x.target in fusible.CONSTANTS):
            found.add(x)
    return found


def _taken_off(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that `node` takes off a constant."""
    if node.target is aten.rsub.Scalar:
        return [first_input(node)]
    if node.target not in (aten.sub.Tensor, aten.sub.Scalar, aten.add.Tensor, aten.add.Scalar):
        return []
    a, b = node.args[:2]
    if node.target in (aten.add.Tensor, aten.add.Scalar):  # 1 + (-x)
        negative = next((x for x in (a, b) if isinstance(x, fx.Node) and x.target is aten.neg.default), None)
        other = b if negative is a else a
        return [first_input(negative)] if negative is not None and number(other) > 0 else []
    return [b] if isinstance(b, fx.Node) and number(a) != 0 and not math.isnan(number(a)) else []


def _all(sources: list[fx.Node], why: Why) -> Hazards:
    return dict.fromkeys(sources, why)


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _is_float(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).is_floating_point()


def _makes_integers(node: fx.Node) -> bool:
    """Return True if `node` turns floats into indices: an argmax, a sort, a conversion."""
    val = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else [val]
    made = [v.dtype for v in vals if isinstance(v, torch.Tensor)]
    if node.target is aten.view.dtype and value(first_input(node)).dtype in FP8_DTYPES:
        return False  # a payload as bytes
    if operators.name_of(node.target) in operators.CREATIONS or operators.shown(node.target).startswith("fp8."):
        return False
    return any(not d.is_floating_point and d != torch.bool and not d.is_complex for d in made)


def _is_zero(arg: Any) -> bool:
    if isinstance(arg, fx.Node):
        return arg.target in fusible.CONSTANTS and fusible.constant_of(arg) == 0
    return arg == 0


def _adds_positive(node: fx.Node) -> bool:
    return any(number(a) > 0 for a in node.args)


def _is_bounded(exponential: fx.Node) -> bool:
    """Return True if all that is done with exp(x) is 1 / (1 + exp(x)), exp(x) / (1 + exp(x)) and log1p(exp(x))."""
    shifted = [u for u in exponential.users if u.target in (aten.add.Tensor, aten.add.Scalar) and _adds_positive(u)]
    for user in exponential.users:
        ratio = user.target in DIVISIONS and user.args[0] is exponential and user.args[1] in shifted
        if user not in shifted and user.target is not aten.log1p.default and not ratio:
            return False
    below = (aten.reciprocal.default, aten.log.default)
    return all(
        user.target in below or (user.target in DIVISIONS and user.args[1] is s) for s in shifted for user in s.users
    )
