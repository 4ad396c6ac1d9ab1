"""The form of a row of `kernels/codegen/spec/operations.py`: all that is known of an operation of generated kernels."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.formats import FORMATS
from fp8compile.kernels.codegen.spec.value_range import RangeRule, unknown


@dataclass(frozen=True)
class Rounding:
    """A bound of how far two approximations of a value differ, in units U of 2^-24: |result| · relative + absolute.

    grows: 2 |x| more, relatively: exp is 2^(x · log2 e) on a GPU, the product rounded.
    """

    relative: float
    absolute: float = 0
    grows: bool = False


class Spread(enum.Enum):
    """The error of a result that errors of the arguments make (`kernels/check/error_bounds.py`)."""

    LARGEST = "no more than the largest of them"
    SUM = "their sum"
    PRODUCT = "each times the other argument"
    QUOTIENT = "that of a division"
    MONOTONE = "what the function makes of the ends"
    MONOTONE_BUT_AT_0 = "likewise, where they do not reach across 0"
    SCALE = "likewise; of an amax that may be 0 the scale may be 1"
    PERIODIC = "no more than themselves, and than 2"
    COMPARISON = "another answer where the arguments are near"
    CHOICE = "those of what is chosen"


class Hazard(enum.Enum):
    """A reason for which rounding an argument to FP8 may change the result by far more than that
    (`passes/save/rounding_hazards.py`)."""

    EXPONENT = "a relative error of an exponent is an absolute one of its logarithm"
    ANGLE = "an angle"
    ZERO = "what rounds to zero gives inf"
    DENOMINATOR = "a denominator that rounds to zero gives inf"
    COMPARISON = "the answer may be another, unless it is compared with 0"
    STEP = "the answer may be another"


@dataclass(frozen=True)
class Operation:
    """An operation on values in FP32, or on bools: `torch(*values, *params)` is its meaning.

    triton           the same as Triton text, with {0}, {1}, … for values and {p0}, … for params ({p_max}: the largest
                     number of the format params[0])
    interpreted      text for Triton's interpreter, where it cannot run the other; `interpreted_helper`: as `helper`
    approximate      cheaper text that is a few ULPs off
    helper           a function of the generated file that `triton` calls ("" for none)
    aten             overloads of ATen that are this of their arguments; `aten_of_bools`: of bools alone
    takes_bools      it computes with bools
    nearest          both forms are rounded to nearest: of equal arguments, they are equal
    rounding         how far both may differ on a GPU, else None; `interpreted_rounding`: in Triton's interpreter
    any_zero         both forms may give zeros of different signs
    """

    torch: Callable[..., Any]
    triton: str
    interpreted: str = ""
    approximate: str = ""
    helper: str = ""
    interpreted_helper: str = ""
    aten: tuple[str, ...] = ()
    aten_of_bools: tuple[str, ...] = ()
    takes_bools: bool = False
    nearest: bool = False
    rounding: Rounding | None = None
    interpreted_rounding: Rounding | None = None
    spread: Spread = Spread.LARGEST
    range: RangeRule = unknown
    hazard: Hazard | None = None
    any_zero: bool = False

    @property
    def gives_bool(self) -> bool:
        """True if the result is a bool."""
        return self.takes_bools or self.spread is Spread.COMPARISON

    def text(self, target: str, params: Sequence[Any] = (), approximately: bool = False) -> str:
        """Return Triton text for "cuda" or "interpreter", with {0}, {1}, … for values."""
        if target == "interpreter":
            text = self.interpreted or self.triton
        else:
            text = (approximately and self.approximate) or self.triton
        names = {f"p{n}": p for n, p in enumerate(params)}
        if params and params[0] in FORMATS:
            names["p_max"] = FORMATS[params[0]].max
        return text.format("{0}", "{1}", "{2}", **names)

    def helpers(self, target: str) -> list[str]:
        """Return the functions of the generated file that the text calls."""
        found = [self.helper, self.interpreted_helper if target == "interpreter" else ""]
        return [helper for helper in found if helper]
