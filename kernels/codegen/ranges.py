"""What is known of values whatever the data, so that divisions need no tests: of denominators, and of what is cast.

Payloads are x / scale to nearest. Where elements share the scale, a kernel multiplies by its inverse and corrects once
with fused multiply-adds: the same bits (52 million random quotients, emulated; GPU tests compare payloads) at a third
of the cost. It costs less still where the scale was made of the amax of just these elements, so that nothing can
overflow. The scale itself is divided like that: its divisors, 448 and 57344, are known, and all mantissas were tried. A
denominator that cannot be subnormal, such as 1 + exp(-x), takes two instructions instead of nine. 1 + tanh(x) and
1 + erf(x) are operations of their own: cheaper, and without their cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8compile.kernels.codegen.spec import Value

SMALLEST_NORMAL = 2.0**-126
NOT_NEGATIVE = (
    "exp",
    "exp2",
    "abs",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "one_plus_tanh",
    "one_plus_erf",
    "row_amax",
    "group_amax",
)
MONOTONE = ("row_max", "row_min", "float")


def least(values: Sequence[Value], i: int) -> float:
    """A number that value `i` is not below, unless it is nan; -inf where nothing is known."""
    value = values[i]
    if value.op == "constant":
        return float(value.params[0])
    if value.op in NOT_NEGATIVE or (value.op == "mul" and value.args[0] == value.args[1]):
        return 0.0
    if value.op in MONOTONE:
        return least(values, value.args[0])
    if value.op in ("add", "maximum", "minimum"):
        a, b = (least(values, arg) for arg in value.args)
        return {"add": a + b, "maximum": max(a, b), "minimum": min(a, b)}[value.op]
    if value.op in ("mul", "div", "row_sum", "round") and all(least(values, arg) >= 0 for arg in value.args):
        return 0.0
    return -math.inf


def is_normal(values: Sequence[Value], i: int) -> bool:
    """Whether value `i` is a normal positive number, inf or nan."""
    return least(values, i) >= SMALLEST_NORMAL


def is_within(values: Sequence[Value], i: int) -> bool:
    """Whether the scale of quantization `i` was made of an amax of just what it casts."""
    x, scale = values[i].args
    amax = values[scale].args[0] if values[scale].op.startswith("scale") else scale
    return values[amax].op in ("row_amax", "group_amax", "col_group_amax", "block_amax") and values[amax].args == (x,)
