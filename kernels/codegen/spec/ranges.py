"""Ranges of the values of a spec (`kernels/codegen/spec/value_range.py`), so that divisions need no tests.

Payloads are x / scale to nearest. Where elements share the scale, a kernel multiplies by its inverse and corrects once
with fused multiply-adds: the same bits (52 million random quotients, emulated; GPU tests compare payloads) at a third
of the cost. It costs less still where the scale was made of the amax of just these elements, so that nothing can
overflow; and a product with the inverse is all where the scale is a power of two. The scale itself is divided like
that: its divisors, 448 and 57344, are known, and all mantissas were tried. A denominator that cannot be subnormal, such
as 1 + exp(-x), takes two instructions instead of nine, and one where 1 is divided. 1 + tanh(x) and 1 + erf(x) are
operations of their own: cheaper, and without their cancellation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8compile.kernels.codegen.spec import value_range
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.reductions import REDUCTIONS
from fp8compile.kernels.codegen.spec.region import GROUP_REDUCTIONS, Value
from fp8compile.kernels.codegen.spec.value_range import NEVER_NEGATIVE, UNKNOWN, Range

SMALLEST_NORMAL = 2.0**-126


def ranges_of(values: Sequence[Value], loaded: Mapping[int, Range] | None = None) -> list[Range]:
    """Return the range of each value; `loaded`: what is known of inputs, by the number that a load names."""
    found: list[Range] = []
    for value in values:
        found.append(_range_of(value, found, loaded or {}))
    return found


def _range_of(value: Value, found: Sequence[Range], loaded: Mapping[int, Range]) -> Range:
    if value.op == "constant":
        return value_range.of_constant(value.params[0])
    if value.op == "load":
        return loaded.get(value.params[0], UNKNOWN)
    if value.op in GROUP_REDUCTIONS:
        return NEVER_NEGATIVE
    row = OPERATIONS.get(value.op) or REDUCTIONS.get(value.op)
    equal = len(value.args) > 1 and len(set(value.args)) == 1
    return row.range([found[a] for a in value.args], equal) if row else UNKNOWN


def is_normal(x: Range) -> bool:
    """Return True if the value is a normal positive number, inf or nan."""
    return x.least >= SMALLEST_NORMAL


def is_within(values: Sequence[Value], i: int) -> bool:
    """Return True if the scale of quantization `i` was made of an amax of just what it casts."""
    x, scale = values[i].args
    amax = values[scale].args[0] if values[scale].op.startswith("scale") else scale
    return values[amax].op in ("row_amax", *GROUP_REDUCTIONS) and values[amax].args == (x,)


def is_power_of_two(values: Sequence[Value], i: int) -> bool:
    """Return True if value `i` is a power of two, inf or nan: x times its inverse is x / value, but for what is
    subnormal in FP32 and is zero in every format of eight bits."""
    return values[i].op in ("predicted_scale", "scale_power_of_two")
