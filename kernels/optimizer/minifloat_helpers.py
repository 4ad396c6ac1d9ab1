"""Functions of generated optimizer kernels for states in E4M3 and E5M2: `kernels/reference/state_reference.py`, step by
step.

A GPU has instructions that cast two numbers at a time, which round and saturate as torch's casts do; four bytes of a
word are cast together. The interpreter computes the same from bits.
"""

from __future__ import annotations

from fp8compile.kernels.codegen.source.helpers import four_codes
from fp8compile.state_formats import MINIFLOATS, Minifloat, StateFormat


def functions(how: StateFormat, name: str, target: str) -> str:
    """Return the functions that the lines of `encoder` call, and decode_<name>."""
    of = MINIFLOATS[how.code]
    casts = _instructions(how.code, name) if target == "cuda" else _computed(name, of)
    return casts + _words(name) + _between_codes(name, of) + (_linear(name, of) if how.linear else _expanded(name, of))


def encoder(how: StateFormat, name: str) -> list[str]:
    """Return lines that make codes of the results of `ends`."""
    least = "low * 0" if how.linear else "low | (signed << 31)"
    number = f"within_{name}(magnitude, low, high)"
    if not how.stochastic:
        sign = ["if not POSITIVE:", "    number = as_float(chosen_bits(as_bits(number), bits, 0x7FFFFFFF))"]
        return [f"number = {number}", *sign, f"return codes_{name}(number, FULL), side_of({least}, high)"]
    of = MINIFLOATS[how.code]
    return [
        f"k = tl.floor(between_codes_{name}(as_bits({number}))).to(tl.int32)",
        f"below = bits_{name}(bits_of_code_{name}(k), low, high)",
        f"above = bits_{name}(bits_of_code_{name}(k + 1), low, high)",
        "code = k + goes_up(magnitude, below, above, pair, odd, counter)",
        f"code = tl.minimum(tl.maximum(code, {int(not how.linear)}), {of.top})",
        f"code = tl.where(magnitude < {'1' if how.linear else 'tl.maximum(low, 1)'}, 0, code)",
        "if not POSITIVE:",
        "    code = code | ((bits >> 24) & 128)",
        f"return packed(code, FULL), side_of({least}, high)",
    ]


def _instructions(code: str, name: str) -> str:
    return f"""
@triton.jit
def word_{name}(a, b, c, d):
    return tl.inline_asm_elementwise(
        "{four_codes(code)}",
        "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def numbers_{name}(word):
    return tl.inline_asm_elementwise(
        "{{ .reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {{low, high}}, $4; "
        "cvt.rn.f16x2.{code}x2 ab, low; cvt.rn.f16x2.{code}x2 cd, high; mov.b32 {{a, b}}, ab; mov.b32 {{c, d}}, cd; "
        "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }}",
        "=r,=r,=r,=r,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )

"""


def _computed(name: str, of: Minifloat) -> str:
    return f"""
@triton.jit
def code_{name}(x):
    y = as_bits(x) & 0x7FFFFFFF
    above = y - {of.normal_bits - (of.first_normal << of.shift)}
    above = (above + {(1 << of.shift - 1) - 1} + ((above >> {of.shift}) & 1)) >> {of.shift}
    below = as_bits(as_float(y) * {1 / of.tiny!r} + 12582912.0) - 0x4B400000
    code = tl.minimum(tl.where(y < {of.normal_bits}, below, above), {of.top})
    return code | ((as_bits(x) >> 24) & 128)


@triton.jit
def number_{name}(code):
    magnitude = code & 127
    subnormal = as_bits(magnitude.to(tl.float32) * {of.tiny!r})
    normal = (magnitude << {of.shift}) + {of.normal_bits - (of.first_normal << of.shift)}
    return as_float(tl.where(magnitude < {of.first_normal}, subnormal, normal) | ((code & 128) << 24))


@triton.jit
def word_{name}(a, b, c, d):
    return word_of_bytes(code_{name}(a), code_{name}(b), code_{name}(c), code_{name}(d))


@triton.jit
def numbers_{name}(word):
    return number_{name}(word), number_{name}(word >> 8), number_{name}(word >> 16), number_{name}(word >> 24)

"""


def _words(name: str) -> str:
    return f"""
@triton.jit
def codes_{name}(x, FULL: tl.constexpr):
    '''Numbers within the format's range to codes, rounded to nearest even.'''
    if FULL:
        a, b, c, d = quarters(x)
        return word_{name}(a, b, c, d)
    else:
        return word_{name}(x, x, x, x) & 255


@triton.jit
def values_{name}(payload, FULL: tl.constexpr):
    '''Return the values of codes.'''
    a, b, c, d = numbers_{name}(payload)
    if FULL:
        return quad(a, b, c, d)
    else:
        return a

"""


def _between_codes(name: str, of: Minifloat) -> str:
    offset = of.normal_bits - (of.first_normal << of.shift)
    return f"""
@triton.jit
def between_codes_{name}(y):
    below = as_float(y) * {1 / of.tiny!r}
    above = (y - {of.normal_bits}).to(tl.float32) * {2.0**-of.shift!r} + {float(of.first_normal)!r}
    return tl.where(y < {of.normal_bits}, below, above)


@triton.jit
def bits_of_code_{name}(code):
    subnormal = as_bits(code.to(tl.float32) * {of.tiny!r})
    return tl.where(code < {of.first_normal}, subnormal, (code << {of.shift}) + {offset})

"""


def _expanded(name: str, of: Minifloat) -> str:
    return f'''
@triton.jit
def within_{name}(magnitude, low, high):
    """Magnitudes stretched to the whole range of the format: bits are moved as numbers are logarithms."""
    span = tl.maximum(high - low, 1)
    per_bit = tl.div_rn(tl.full(span.shape, {float(of.span)!r}, tl.float32), span.to(tl.float32))
    stretched = nearest((magnitude - low).to(tl.float32) * per_bit)  # below 0 for what is zero alone
    return as_float(tl.where(magnitude < tl.maximum(low, 1), 0, tl.minimum(stretched, {of.span}) + {of.low_bits}))


@triton.jit
def bits_{name}(bits, low, high):
    per_bit = up((high - low).to(tl.float32) * {1 / of.span!r})
    return tl.minimum(low + nearest((bits - {of.low_bits}).to(tl.float32) * per_bit), high)


@triton.jit
def decode_{name}(payload, side, POSITIVE: tl.constexpr, FULL: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite.

    POSITIVE: no group has signs; one that has some all the same is nan.
    """
    number = as_bits(values_{name}(payload, FULL))
    low, high = side.to(tl.int32), (side >> 32).to(tl.int32)
    magnitude = number if POSITIVE else number & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits_{name}(magnitude, low & 0x7FFFFFFF, high))
    is_nan = high >= 0x7F800000
    if POSITIVE:
        is_nan = is_nan | (low < 0)
    else:
        bits = chosen_bits(bits, number, 0x7FFFFFFF)
    return as_float(bits | tl.where(is_nan, 0x7FC00000, 0))
'''


def _linear(name: str, of: Minifloat) -> str:
    return f'''
@triton.jit
def scale_{name}(high):
    greatest = as_float(tl.minimum(high, 0x7F7FFFFF))
    return tl.maximum(up(greatest * {1 / of.max!r}), 1.1754943508222875e-38)


@triton.jit
def within_{name}(magnitude, low, high):
    return as_float(tl.minimum(magnitude, 0x7F7FFFFF)) * inverse(scale_{name}(high))


@triton.jit
def bits_{name}(bits, low, high):
    return tl.minimum(as_bits(as_float(bits) * scale_{name}(high)), high)


@triton.jit
def decode_{name}(payload, side, POSITIVE: tl.constexpr, FULL: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite."""
    high = (side >> 32).to(tl.int32)
    is_finite = high < 0x7F800000
    scale = as_float(tl.where(is_finite, as_bits(scale_{name}(high)), 0x7FC00000))
    number = as_bits(values_{name}(payload, FULL) * scale)
    greatest = tl.where(is_finite, high, 0x7FFFFFFF)
    if POSITIVE:
        return as_float(tl.minimum(number, greatest))
    else:
        return as_float(chosen_bits(tl.minimum(number & 0x7FFFFFFF, greatest), number, 0x7FFFFFFF))
'''
