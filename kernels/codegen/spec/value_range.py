"""Ranges of values, which hold whatever the data: a lower bound, and a sign; and the rules by which they follow.

Three ask: divisions that need no tests (a denominator is a normal number), codes of optimizer states (no value has a
sign bit), and what backward may see rounded (a denominator does not round to zero). All get it from these rules, one
for each operation of the table in `kernels/codegen/spec/operations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NOT_TINY = 2.0**-8  # a constant that keeps a sum from what rounding to FP8 does to small numbers


@dataclass(frozen=True)
class Range:
    """A lower bound and the sign of a value that is not nan.

    least: it is not below this. unsigned: its sign bit is never set: it is no -0 either. positive: it is above some
    constant that is not tiny, even if what it is computed from is rounded.
    """

    least: float = -math.inf
    unsigned: bool = False
    positive: bool = False

    @property
    def never_negative(self) -> bool:
        """True if the value is not below 0."""
        return self.least >= 0


UNKNOWN = Range()
NEVER_NEGATIVE = Range(0.0, unsigned=True)
RangeRule = Callable[[Sequence[Range], bool], Range]  # (ranges of the arguments, all are one value) -> of the result


def of_constant(x: float | bool) -> Range:
    """Return the range of a number."""
    return Range(float(x), not isinstance(x, bool) and math.copysign(1, x) > 0, x >= NOT_TINY)


def least_of(ranges: Sequence[Range]) -> Range:
    """Return what holds of each of several values: of a concatenation, of one that is chosen of them."""
    return Range(min(r.least for r in ranges), all(r.unsigned for r in ranges), all(r.positive for r in ranges))


def unknown(_: Sequence[Range], __: bool) -> Range:
    """Return that nothing is known."""
    return UNKNOWN


def never_negative(_: Sequence[Range], __: bool) -> Range:
    """Return the range of exp(x), |x|, and other functions that have no negative values."""
    return NEVER_NEGATIVE


def same(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of what has the values of its argument: maxima, minima, conversions to FP32."""
    return ranges[0]


def root(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of √x. The root of -0 is -0."""
    return Range(0.0, ranges[0].unsigned, ranges[0].positive)


def inverse_root(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of 1 / √x, which may be as small as x is large."""
    return Range(0.0, ranges[0].unsigned)


def total(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of a sum or mean of many values, or of a value that is rounded: of its sign, that is."""
    (x,) = ranges
    return Range(0.0 if x.never_negative else -math.inf, x.unsigned, x.positive)


def add(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of a + b."""
    a, b = ranges
    positive = (a.never_negative and b.positive) or (b.never_negative and a.positive)
    return Range(a.least + b.least, a.unsigned and b.unsigned, positive)


def multiply(ranges: Sequence[Range], equal: bool) -> Range:
    """Return the range of a · b; that of a square where both are one value."""
    positive = all(r.positive for r in ranges)
    if equal:
        return Range(0.0, True, positive)
    return Range(_sign_of_all(ranges), all(r.unsigned for r in ranges), positive)


def divide(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of a / b."""
    return Range(_sign_of_all(ranges), all(r.unsigned for r in ranges))


def _sign_of_all(ranges: Sequence[Range]) -> float:
    return 0.0 if all(r.never_negative for r in ranges) else -math.inf


def maximum(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of max(a, b)."""
    return Range(max(r.least for r in ranges), any(r.unsigned for r in ranges), any(r.positive for r in ranges))


def minimum(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of min(a, b)."""
    return least_of(ranges)


def chosen(ranges: Sequence[Range], _: bool) -> Range:
    """Return the range of what a condition, the first argument, chooses of the others."""
    return least_of(ranges[1:])
