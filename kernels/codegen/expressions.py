"""What a region can compute element by element: one row an operation, in torch and in Triton.

The reference evaluates the first form, the emitter writes the second; both see FP32 (or bool) values. Where they
differ, it is by the last bits of a transcendental function or of a fused multiply-add: never by a rounding to a
narrower type, which happens at stores only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile.kernels.reference import markers

INT32_ABS = 0x7FFFFFFF


@dataclass(frozen=True)
class Expression:
    """One operation: `torch(*values, *params)`, and Triton text with {0}, {1}, … for values and {p0}, … for params.

    `interpreted` is the text for Triton's interpreter where it cannot run the other; `exact` says that both forms give
    the same bits; `helper` names a function of the generated file that the text calls.
    """

    torch: Callable[..., Any]
    triton: str
    interpreted: str = ""
    exact: bool = True
    helper: str = ""


def _round(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, dtype)).float()


EXPRESSIONS: dict[str, Expression] = {
    "add": Expression(torch.add, "{0} + {1}"),
    "sub": Expression(torch.sub, "{0} - {1}"),
    "mul": Expression(torch.mul, "{0} * {1}"),
    "div": Expression(torch.div, "{0} / {1}", exact=False),
    "neg": Expression(torch.neg, "{0} * -1.0"),  # Triton's -x is 0 - x, which makes 0 of 0
    "abs": Expression(torch.abs, "tl.abs({0})"),
    "maximum": Expression(torch.maximum, "tl.maximum({0}, {1}, tl.PropagateNan.ALL)", "_maximum({0}, {1})"),
    "minimum": Expression(torch.minimum, "tl.minimum({0}, {1}, tl.PropagateNan.ALL)", "_minimum({0}, {1})"),
    "exp": Expression(torch.exp, "fast_exp({0})", exact=False, helper="fast_exp"),
    "exp2": Expression(torch.exp2, "libdevice.exp2({0})", "tl.exp2({0})", exact=False),
    "expm1": Expression(torch.expm1, "libdevice.expm1({0})", "(tl.exp({0}) - 1.0)", exact=False),
    "log": Expression(torch.log, "tl.log({0})", exact=False),
    "log2": Expression(torch.log2, "tl.log2({0})", exact=False),
    "log1p": Expression(torch.log1p, "libdevice.log1p({0})", "tl.log(1.0 + {0})", exact=False),
    "sin": Expression(torch.sin, "tl.sin({0})", exact=False),
    "cos": Expression(torch.cos, "tl.cos({0})", exact=False),
    "tanh": Expression(torch.tanh, "tanh({0})", exact=False, helper="tanh"),
    "one_plus_tanh": Expression(lambda x: torch.tanh(x) + 1, "2.0 * sigmoid(2.0 * {0})", exact=False, helper="sigmoid"),
    "erf": Expression(torch.erf, "tl.erf({0})", exact=False),
    "one_plus_erf": Expression(lambda x: torch.erf(x) + 1, "one_plus_erf({0})", exact=False, helper="one_plus_erf"),
    "sigmoid": Expression(torch.sigmoid, "sigmoid({0})", exact=False, helper="sigmoid"),
    "sqrt": Expression(torch.sqrt, "tl.sqrt_rn({0})", exact=False),  # torch on a CPU is 1 ULP off
    "rsqrt": Expression(torch.rsqrt, "tl.rsqrt({0})", exact=False),
    "reciprocal": Expression(torch.reciprocal, "1.0 / {0}", exact=False),
    "floor": Expression(torch.floor, "tl.floor({0})"),
    "ceil": Expression(torch.ceil, "tl.ceil({0})"),
    "lt": Expression(torch.lt, "{0} < {1}"),
    "le": Expression(torch.le, "{0} <= {1}"),
    "gt": Expression(torch.gt, "{0} > {1}"),
    "ge": Expression(torch.ge, "{0} >= {1}"),
    "eq": Expression(torch.eq, "{0} == {1}"),
    "ne": Expression(torch.ne, "{0} != {1}"),
    "and": Expression(torch.logical_and, "{0} & {1}"),
    "or": Expression(torch.logical_or, "{0} | {1}"),
    "xor": Expression(torch.logical_xor, "{0} ^ {1}"),
    "not": Expression(torch.logical_not, "{0} == 0"),
    "where": Expression(torch.where, "tl.where({0}, {1}, {2})"),
    "float": Expression(lambda x: x.float(), "{0}.to(tl.float32)"),
    "round": Expression(_round, "{0}.to(tl.{p0}).to(tl.float32)"),
    # The numerics contract: scale from amax, and data from value and scale.
    "scale": Expression(markers.scale, "scale_of({0}, {p_max})", helper="scale_of"),
    "scale_power_of_two": Expression(
        lambda amax, fmt: markers.scale(amax, fmt, True),
        "power_of_two(scale_of({0}, {p_max}))",
        helper="power_of_two",
    ),
    "quantize": Expression(lambda x, s, fmt: x / s, ""),  # the cast itself: `emit` writes it
}
