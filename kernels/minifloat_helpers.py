"""Functions of generated optimizer kernels for states in E4M3 and E5M2: `kernels/state_reference.py`, step by step."""

from __future__ import annotations

from fp8compile.state_formats import MINIFLOATS, Minifloat, StateFormat

ZERO = 12582912.0  # whose bits are 0x4B400000, and those of what is up to 2^22 more as many more


def functions(how: StateFormat, name: str) -> str:
    """What the lines of `encoder` call, and decode_<name>."""
    of = MINIFLOATS[how.code]
    return _codes(name, of) + (_linear(name, of) if how.linear else _expanded(name, of)) + _decode(name)


def encoder(how: StateFormat, name: str) -> list[str]:
    """Lines that make codes of what `ends` returns."""
    lines = [f"t = position_{name}(magnitude, low, high, signed)"]
    if how.stochastic:
        lines += ["k = tl.floor(t).to(tl.int32)"]
        lines += [f"below, above = bits_{name}(k, low, high, signed), bits_{name}(k + 1, low, high, signed)"]
        lines += ["code = k + goes_up(magnitude, below, above, pair, odd, counter)"]
    else:
        lines += [f"code = as_bits(t + {ZERO}) - 0x4B400000"]
    lines += [f"code = tl.minimum(tl.maximum(code, {int(not how.linear)}), {MINIFLOATS[how.code].top})"]
    lines += ["code = tl.where(magnitude == 0, 0, code)", "if not POSITIVE:", "    code = code | ((bits >> 24) & 128)"]
    least = "low * 0" if how.linear else "low | (signed << 31)"
    return [*lines, f"return packed(code, FULL), side_of({least}, high)"]


def _codes(name: str, of: Minifloat) -> str:
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
    return f"""
@triton.jit
def position_{name}(magnitude, low, high, signed):
    span = tl.maximum(high - low, 1)
    per_bit = tl.div_rn(tl.full(span.shape, {float(of.span)!r}, tl.float32), span.to(tl.float32))
    stretched = nearest(tl.maximum((magnitude - low).to(tl.float32) * per_bit, 0.0))
    return between_codes_{name}(tl.minimum(stretched, {of.span}) + {of.low_bits})


@triton.jit
def bits_{name}(code, low, high, signed):
    per_bit = up((high - low).to(tl.float32) * {1 / of.span!r})
    offset = (bits_of_code_{name}(code) - {of.low_bits}).to(tl.float32) * per_bit
    return tl.minimum(low + nearest(offset), high)

"""


def _linear(name: str, of: Minifloat) -> str:
    return f"""
@triton.jit
def scale_{name}(high):
    greatest = as_float(tl.minimum(high, 0x7F7FFFFF))
    return tl.maximum(up(greatest * {1 / of.max!r}), 1.1754943508222875e-38)


@triton.jit
def position_{name}(magnitude, low, high, signed):
    finite = as_float(tl.minimum(magnitude, 0x7F7FFFFF))
    scale = tl.broadcast_to(scale_{name}(high), magnitude.shape)
    return between_codes_{name}(as_bits(tl.div_rn(finite, scale)))


@triton.jit
def bits_{name}(code, low, high, signed):
    return tl.minimum(as_bits(as_float(bits_of_code_{name}(code)) * scale_{name}(high)), high)

"""


def _decode(name: str) -> str:
    return f'''
@triton.jit
def decode_{name}(payload, side, POSITIVE: tl.constexpr, FULL: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite."""
    code = unpacked(payload, FULL)
    magnitude = code & 127
    low, high = side.to(tl.int32), (side >> 32).to(tl.int32)
    nan = tl.where(high >= 0x7F800000, 0x7FC00000, 0)
    bits = bits_{name}(magnitude, low & 0x7FFFFFFF, high, 0)
    return as_float(tl.where(magnitude == 0, 0, bits) | ((code & 128) << 24) | nan)
'''
