"""Functions that generated kernels call, written into each file that needs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """Source of a function, and another where Triton's interpreter cannot run the first."""

    source: str
    interpreted: str = ""

    def for_target(self, target: str) -> str:
        """Return the source for "cuda" or "interpreter"."""
        return ((target == "interpreter" and self.interpreted) or self.source).strip("\n")


def four_codes(ptx: str) -> str:
    """Return PTX that makes four FP32 numbers ($1 to $4) codes in a word ($0): to nearest even, saturated, nan kept.

    The halves are joined by an or. `mov.b32 $0, {lo, hi}` is an instruction less, and ptxas 12.8 miscompiles it where
    both halves come of the same registers (constants of padding, a number repeated along a row): of the two casts it
    drops the one that it merges the other with, and the upper half is whatever the register held.
    """
    return (
        "{ .reg .b16 lo, hi; .reg .b32 word, high; "
        f"cvt.rn.satfinite.{ptx}x2.f32 lo, $2, $1; cvt.rn.satfinite.{ptx}x2.f32 hi, $4, $3; "
        "cvt.u32.u16 word, lo; cvt.u32.u16 high, hi; shl.b32 high, high, 16; or.b32 $0, word, high; }"
    )


def _cast(name: str, ptx: str, triton: str, limit: str) -> Helper:
    """Return a cast of FP32 to FP8. Packed by hand: Triton's own cast, stored in two layouts, is miscompiled for Hopper
    by ptxas 12.8 (triton-lang/triton#11111)."""
    return Helper(
        f'''
@triton.jit
def to_{name}(x):
    """Four FP32 to four bytes of {name} at a time: to nearest even, saturated."""
    return tl.inline_asm_elementwise(
        "{four_codes(ptx)}",
        "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
    )
''',
        f'''
@triton.jit
def to_{name}(x):
    """FP32 to bytes of {name}: to nearest even, saturated."""
    x = tl.where(x > {limit}, {limit}, tl.where(x < -{limit}, -{limit}, x))
    return x.to(tl.{triton}).to(tl.uint8, bitcast=True)
''',
    )


def _words(name: str, ptx: str) -> Helper:
    """Return a cast of four rows to codes in one word; by hand for the reason of `_cast`."""
    return Helper(
        f'''
@triton.jit
def words_{name}(a, b, c, d):
    """Four FP32 tensors to one of words, each four codes of {name}: to nearest even, saturated."""
    return tl.inline_asm_elementwise(
        "{four_codes(ptx)}",
        "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
    )
''',
        f'''
@triton.jit
def words_{name}(a, b, c, d):
    """Four FP32 tensors to one of words, each four codes of {name}: to nearest even, saturated."""
    low = to_{name}(a).to(tl.uint32) | (to_{name}(b).to(tl.uint32) << 8)
    return (low | (to_{name}(c).to(tl.uint32) << 16) | (to_{name}(d).to(tl.uint32) << 24)).to(tl.int32, bitcast=True)
''',
    )


def _cast_of_one(name: str, ptx: str) -> Helper:
    """Return a cast of FP32 to FP8 for tensors of less than four elements, which cannot be packed."""
    return Helper(f'''
@triton.jit
def to_{name}_singly(x):
    """FP32 to bytes of {name}, one at a time: to nearest even, saturated."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.{ptx}x2.f32 $0, 0f00000000, $1;",
        "=h,r", [x], dtype=tl.int16, is_pure=True, pack=1,
    ).to(tl.uint8)
''')


HELPERS = {
    "to_e4m3_singly": _cast_of_one("e4m3", "e4m3"),
    "to_e5m2_singly": _cast_of_one("e5m2", "e5m2"),
    "words_e4m3": _words("e4m3", "e4m3"),
    "words_e5m2": _words("e5m2", "e5m2"),
    "to_e4m3": _cast("e4m3", "e4m3", "float8e4nv", "448.0"),
    "to_e5m2": _cast("e5m2", "e5m2", "float8e5", "57344.0"),
    "quotient": Helper(
        '''
@triton.jit
def quotient(x, scale, inverse):
    """x / scale to nearest, by the scale's inverse and one correction (Markstein, IBM J. R&D 34, 1990): a division for
    each scale instead of each element. The signs are such that -0 stays -0 (-x would be 0 - x). Beyond 1e30 it is some
    number of that sign and no smaller, as a format saturates long before; a nan, which clamp drops, is in x too."""
    finite = tl.where(scale == float("inf"), 0.0, scale)
    near = tl.clamp(x * inverse, -1e30, 1e30)
    return tl.fma(tl.fma(near, finite, x * -1.0), inverse * -1.0, near)
''',
        '''
@triton.jit
def quotient(x, scale, inverse):
    """x / scale to nearest."""
    return tl.div_rn(x, scale)
''',
    ),
    "quotient_within": Helper(
        '''
@triton.jit
def quotient_within(x, scale, inverse):
    """`quotient` of an x that is no larger than what the scale was made of, so that x / scale cannot overflow."""
    finite = tl.where(scale == float("inf"), 0.0, scale)
    near = x * inverse
    return tl.fma(tl.fma(near, finite, x * -1.0), inverse * -1.0, near)
''',
        '''
@triton.jit
def quotient_within(x, scale, inverse):
    """x / scale to nearest."""
    return tl.div_rn(x, scale)
''',
    ),
    "magnitude": Helper(
        '''
@triton.jit
def magnitude(x):
    """Bits of |x|. As integers they are ordered like |x|, with inf above all numbers and nan above inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
'''
    ),
    "larger": Helper(
        '''
@triton.jit
def larger(total, x):
    """The larger of total and |x|, nan if one is: an instruction, where `magnitude` and a maximum are two."""
    return tl.maximum(total, tl.abs(x.to(tl.float32)), tl.PropagateNan.ALL)
''',
        '''
@triton.jit
def larger(total, x):
    """The larger of total and |x|, nan if one is."""
    size = tl.abs(x.to(tl.float32))
    return tl.where((size != size) | (size > total), size, total)
''',
    ),
    "ordered": Helper(
        '''
@triton.jit
def ordered(x, of_nan):
    """Integers in the order of x, with nan where `of_nan` says."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, of_nan, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
'''
    ),
    "from_ordered": Helper(
        '''
@triton.jit
def from_ordered(bits):
    """Return what `ordered` made these integers of; the ends of their range are nan."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
'''
    ),
    "fast_div": Helper(
        '''
@triton.jit
def fast_div(a, b):
    """a / b within 2 ULP, for 2^-126 ≤ b ≤ 2^126 (0 beyond): a quarter of the instructions of a / b."""
    return libdevice.fast_dividef(a, b)
''',
        '''
@triton.jit
def fast_div(a, b):
    """a / b."""
    return a / b
''',
    ),
    "fast_inverse": Helper(
        '''
@triton.jit
def fast_inverse(x):
    """1 / x within 1 ULP, for 2^-126 ≤ x ≤ 2^126 (0 beyond): one instruction."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
        '''
@triton.jit
def fast_inverse(x):
    """1 / x."""
    return 1.0 / x
''',
    ),
    "fast_exp": Helper(
        '''
@triton.jit
def fast_exp(x):
    """exp(x) within 2 ULP and the rounding of x · log2(e); what would be subnormal is 0."""
    return libdevice.fast_expf(x)
''',
        '''
@triton.jit
def fast_exp(x):
    """exp(x)."""
    return tl.exp(x)
''',
    ),
    "sigmoid": Helper(
        '''
@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return fast_inverse(1.0 + fast_exp(-x))
'''
    ),
    "one_plus_erf": Helper(
        '''
@triton.jit
def one_plus_erf(x):
    """erfc(-x), without the cancellation that 1 + erf(x) has where x is negative: erfc(z) = t · exp(p(t) - z²) for
    z ≥ 0, with t = 1 / (1 + z / 2) (Press et al., Numerical Recipes, section 6.2)."""
    z = tl.abs(x)
    t = fast_inverse(1.0 + 0.5 * z)
    p = 1.48851587 + t * (-0.82215223 + t * 0.17087277)
    p = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * p)))
    tail = t * fast_exp(-1.26551223 + t * (1.00002368 + t * (0.37409196 + t * p)) - z * z)
    return tl.where(x > 0, 2.0 - tail, tail)
'''
    ),
    "tanh": Helper(
        '''
@triton.jit
def tanh(x):
    """By exp where |x| ≥ 1/4, else by its series; half as many instructions as libdevice's."""
    e = fast_exp(-2.0 * tl.abs(x))
    large = fast_div(1.0 - e, 1.0 + e)
    y = x * x
    small = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))
'''
    ),
    "scale_of": Helper(
        '''
@triton.jit
def scale_of(amax, limit):
    """amax / limit to nearest, as `quotient` has it; 1 where amax is 0; never subnormal; nan and inf pass."""
    near = amax * (1.0 / limit)
    scale = tl.fma(tl.fma(near, limit, amax * -1.0), -1.0 / limit, near)
    scale = tl.where(amax == float("inf"), amax, scale)
    return tl.where(amax == 0, 1.0, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))
''',
        '''
@triton.jit
def scale_of(amax, limit):
    """amax / limit; 1 where amax is 0; never subnormal; nan and inf pass."""
    scale = tl.div_rn(amax, limit)
    return tl.where(amax == 0, 1.0, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))
''',
    ),
    "inverse_of": Helper(
        '''
@triton.jit
def inverse_of(x):
    """1 / x to nearest, in fewer instructions than a division."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
        '''
@triton.jit
def inverse_of(x):
    """1 / x to nearest."""
    return tl.div_rn(1.0, x)
''',
    ),
    "power_of_two": Helper(
        '''
@triton.jit
def power_of_two(scale):
    """The least power of two that is no smaller; nan and inf pass."""
    up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((scale != scale) | (scale == float("inf")), scale, up)
'''
    ),
    "predicted_scale": Helper(
        '''
@triton.jit
def predicted_scale(sample, limit):
    """The scale that the amax of some rows predicts: a power of two, 8 to 16 times their own."""
    return tl.where(sample == 0, 1.0, power_of_two(scale_of(sample, limit)) * 8.0)
'''
    ),
    "is_predicted": Helper(
        '''
@triton.jit
def is_predicted(amax, sample, limit):
    """True where nothing saturates under `predicted_scale`, all is finite, and the sample is not zero."""
    return (sample > 0) & (amax < predicted_scale(sample, limit) * limit)
'''
    ),
    "_maximum": Helper(
        """
@triton.jit
def _maximum(a, b):
    return tl.where((a != a) | (a > b), a, b)
"""
    ),
    "_minimum": Helper(
        """
@triton.jit
def _minimum(a, b):
    return tl.where((a != a) | (a < b), a, b)
"""
    ),
}
NEEDS = {
    "words_e4m3": ("to_e4m3",),
    "words_e5m2": ("to_e5m2",),
    "power_of_two": ("scale_of",),
    "predicted_scale": ("power_of_two",),
    "is_predicted": ("predicted_scale",),
    "sigmoid": ("fast_inverse", "fast_exp"),
    "tanh": ("fast_div", "fast_exp"),
    "one_plus_erf": ("fast_inverse", "fast_exp"),
}


def with_needed(helpers: Iterable[str]) -> list[str]:
    """Return `helpers` and those that they call, each once and behind what it calls."""
    found: dict[str, None] = {}

    def add(helper: str) -> None:
        for other in NEEDS.get(helper, ()):
            add(other)
        found[helper] = None

    for helper in helpers:
        add(helper)
    return list(found)
