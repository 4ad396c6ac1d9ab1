"""The operations that a region or an optimizer's update can compute element by element: one row each.

All that is known of an operation stands in its row. The reference evaluates its meaning, the emitters write its text,
and checks, ranges, rules for graphs (`passes/core/fusible.py`) and hazards of rounding read the rest. Both forms see
FP32 (or bool) values; they differ by the last bits of a transcendental function or of a fused multiply-add, never by a
rounding to a narrower type, which happens at stores only.

Of errors: on a GPU div.full, ex2.approx and rsqrt.approx are within 2 ULP = 4 units of `Rounding`, and libdevice within
2 ULP; torch is within 1 ULP = 2 units.
"""

from __future__ import annotations

import torch

from fp8compile.kernels.codegen.spec import value_range as ranges
from fp8compile.kernels.codegen.spec.operation import Hazard, Operation, Rounding, Spread
from fp8compile.kernels.reference import markers


def _round(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype)).float()


ARITHMETIC = {
    "add": Operation(
        torch.add, "{0} + {1}", aten=("add.Tensor", "add.Scalar"),
        nearest=True, spread=Spread.SUM, range=ranges.add,
    ),
    "sub": Operation(
        torch.sub, "{0} - {1}", aten=("sub.Tensor", "sub.Scalar"),
        nearest=True, spread=Spread.SUM,
    ),
    "mul": Operation(
        torch.mul, "{0} * {1}", aten=("mul.Tensor", "mul.Scalar"),
        nearest=True, spread=Spread.PRODUCT, range=ranges.multiply,
    ),
    "div": Operation(
        torch.div, "{0} / {1}", approximate="{0} * fast_reciprocal({1})", aten=("div.Tensor", "div.Scalar"),
        rounding=Rounding(8), spread=Spread.QUOTIENT, range=ranges.divide, hazard=Hazard.DENOMINATOR,
    ),
    "reciprocal": Operation(
        torch.reciprocal, "1.0 / {0}", approximate="fast_reciprocal({0})", aten=("reciprocal.default",),
        rounding=Rounding(8), spread=Spread.MONOTONE_BUT_AT_0, hazard=Hazard.ZERO,
    ),
    "neg": Operation(torch.neg, "{0} * -1.0", aten=("neg.default",)),  # Triton's -x is 0 - x, which makes 0 of 0
    "abs": Operation(torch.abs, "tl.abs({0})", aten=("abs.default",), range=ranges.never_negative),
    "maximum": Operation(
        torch.maximum, "tl.maximum({0}, {1}, tl.PropagateNan.ALL)", "_maximum({0}, {1})",
        interpreted_helper="_maximum", aten=("maximum.default", "clamp_min.default", "clamp_min.Tensor"),
        range=ranges.maximum, any_zero=True,
    ),
    "minimum": Operation(
        torch.minimum, "tl.minimum({0}, {1}, tl.PropagateNan.ALL)", "_minimum({0}, {1})",
        interpreted_helper="_minimum", aten=("minimum.default", "clamp_max.default", "clamp_max.Tensor"),
        range=ranges.minimum, any_zero=True,
    ),
    "sqrt": Operation(  # torch on a CPU is 1 ULP off
        torch.sqrt, "tl.sqrt_rn({0})", approximate="fast_sqrt({0})", aten=("sqrt.default",),
        rounding=Rounding(4), spread=Spread.MONOTONE, range=ranges.root,
    ),
    "rsqrt": Operation(
        torch.rsqrt, "tl.rsqrt({0})", aten=("rsqrt.default",),
        rounding=Rounding(8), spread=Spread.MONOTONE_BUT_AT_0, range=ranges.inverse_root, hazard=Hazard.ZERO,
    ),
    "floor": Operation(
        torch.floor, "tl.floor({0})", aten=("floor.default",), spread=Spread.MONOTONE, hazard=Hazard.STEP
    ),
    "ceil": Operation(torch.ceil, "tl.ceil({0})", aten=("ceil.default",), spread=Spread.MONOTONE, hazard=Hazard.STEP),
}  # fmt: skip

TRANSCENDENTAL = {
    "exp": Operation(
        torch.exp, "fast_exp({0})", helper="fast_exp", aten=("exp.default",),
        rounding=Rounding(8, grows=True), spread=Spread.MONOTONE, range=ranges.never_negative, hazard=Hazard.EXPONENT,
    ),
    "exp2": Operation(
        torch.exp2, "libdevice.exp2({0})", "tl.exp2({0})", aten=("exp2.default",),
        rounding=Rounding(8), spread=Spread.MONOTONE, range=ranges.never_negative, hazard=Hazard.EXPONENT,
    ),
    "expm1": Operation(  # the interpreter's form cancels
        torch.expm1, "libdevice.expm1({0})", "(tl.exp({0}) - 1.0)", aten=("expm1.default",),
        rounding=Rounding(8, grows=True), interpreted_rounding=Rounding(16, 16, grows=True), spread=Spread.MONOTONE,
        hazard=Hazard.EXPONENT,
    ),
    "log": Operation(
        torch.log, "tl.log({0})", aten=("log.default",),
        rounding=Rounding(8), spread=Spread.MONOTONE_BUT_AT_0, hazard=Hazard.ZERO,
    ),
    "log2": Operation(
        torch.log2, "tl.log2({0})", aten=("log2.default",),
        rounding=Rounding(8), spread=Spread.MONOTONE_BUT_AT_0, hazard=Hazard.ZERO,
    ),
    "log1p": Operation(  # the interpreter's form cancels
        torch.log1p, "libdevice.log1p({0})", "tl.log(1.0 + {0})", aten=("log1p.default",),
        rounding=Rounding(8), interpreted_rounding=Rounding(8, 8), spread=Spread.MONOTONE,
    ),
    "sin": Operation(
        torch.sin, "tl.sin({0})", aten=("sin.default",),
        rounding=Rounding(8, 8), spread=Spread.PERIODIC, hazard=Hazard.ANGLE,
    ),
    "cos": Operation(
        torch.cos, "tl.cos({0})", aten=("cos.default",),
        rounding=Rounding(8, 8), spread=Spread.PERIODIC, hazard=Hazard.ANGLE,
    ),
    "tanh": Operation(
        torch.tanh, "tanh({0})", helper="tanh", aten=("tanh.default",),
        rounding=Rounding(24), spread=Spread.MONOTONE,
    ),
    "one_plus_tanh": Operation(
        lambda x: torch.tanh(x) + 1, "2.0 * sigmoid(2.0 * {0})", helper="sigmoid",
        rounding=Rounding(12, 4, grows=True), spread=Spread.MONOTONE, range=ranges.never_negative,
    ),
    "erf": Operation(
        torch.erf, "tl.erf({0})", aten=("erf.default",), rounding=Rounding(8), spread=Spread.MONOTONE
    ),
    "one_plus_erf": Operation(
        lambda x: torch.erf(x) + 1, "one_plus_erf({0})", helper="one_plus_erf",
        rounding=Rounding(16, 8), spread=Spread.MONOTONE, range=ranges.never_negative,
    ),
    "sigmoid": Operation(
        torch.sigmoid, "sigmoid({0})", helper="sigmoid", aten=("sigmoid.default",),
        rounding=Rounding(12, grows=True), spread=Spread.MONOTONE, range=ranges.never_negative,
    ),
}  # fmt: skip

COMPARISONS = {
    "lt": Operation(
        torch.lt, "{0} < {1}", aten=("lt.Tensor", "lt.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.COMPARISON
    ),
    "le": Operation(
        torch.le, "{0} <= {1}", aten=("le.Tensor", "le.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.COMPARISON
    ),
    "gt": Operation(
        torch.gt, "{0} > {1}", aten=("gt.Tensor", "gt.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.COMPARISON
    ),
    "ge": Operation(
        torch.ge, "{0} >= {1}", aten=("ge.Tensor", "ge.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.COMPARISON
    ),
    "eq": Operation(
        torch.eq, "{0} == {1}", aten=("eq.Tensor", "eq.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.STEP
    ),
    "ne": Operation(
        torch.ne, "{0} != {1}", aten=("ne.Tensor", "ne.Scalar"), spread=Spread.COMPARISON, hazard=Hazard.STEP
    ),
}

LOGIC = {
    "and": Operation(
        torch.logical_and, "{0} & {1}", takes_bools=True,
        aten=("logical_and.default",), aten_of_bools=("bitwise_and.Tensor",),
    ),
    "or": Operation(
        torch.logical_or, "{0} | {1}", takes_bools=True,
        aten=("logical_or.default",), aten_of_bools=("bitwise_or.Tensor",),
    ),
    "xor": Operation(
        torch.logical_xor, "{0} ^ {1}", takes_bools=True,
        aten=("logical_xor.default",), aten_of_bools=("bitwise_xor.Tensor",),
    ),
    "not": Operation(
        torch.logical_not, "{0} == 0", takes_bools=True,
        aten=("logical_not.default",), aten_of_bools=("bitwise_not.default",),
    ),
}  # fmt: skip

CONVERSIONS = {
    "where": Operation(
        torch.where, "tl.where({0}, {1}, {2})", aten=("where.self",), spread=Spread.CHOICE, range=ranges.chosen
    ),
    "float": Operation(lambda x: x.float(), "{0}.to(tl.float32)", range=ranges.same),
    "round": Operation(_round, "{0}.to(tl.{p0}).to(tl.float32)", spread=Spread.MONOTONE, range=ranges.total),
    # The numerics contract: scale from amax, and data from value and scale.
    "scale": Operation(
        markers.scale, "scale_of({0}, {p_max})", helper="scale_of", nearest=True, spread=Spread.SCALE
    ),
    "scale_power_of_two": Operation(
        lambda amax, fmt: markers.scale(amax, fmt, True), "power_of_two(scale_of({0}, {p_max}))",
        helper="power_of_two", spread=Spread.SCALE,
    ),
    "predicted_scale": Operation(
        markers.predicted_scale, "predicted_scale({0}, {p_max})", helper="predicted_scale", nearest=True,
        spread=Spread.SCALE,
    ),
    "is_predicted": Operation(
        markers.is_predicted, "is_predicted({0}, {1}, {p_max})", helper="is_predicted", spread=Spread.COMPARISON
    ),
    "quantize": Operation(lambda x, s, fmt: x / s, "", nearest=True, spread=Spread.QUOTIENT),  # cast by emit/values.py
}  # fmt: skip

OPERATIONS: dict[str, Operation] = ARITHMETIC | TRANSCENDENTAL | COMPARISONS | LOGIC | CONVERSIONS
