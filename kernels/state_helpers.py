"""Functions of generated optimizer kernels, in Triton: `kernels/state_reference.py`, operation by operation.

A tile is [groups, 128], what belongs to a group is [groups, 1]. Everything is an integer operation or one correctly
rounded FP32 operation (kernels are launched without contraction to fused multiply-adds), so codes agree bit for bit.
"""

from __future__ import annotations

from fp8compile.kernels.state_reference import LOG_STEPS
from fp8compile.state_formats import MINIFLOATS, Minifloat, StateFormat

NEAREST = {
    "cuda": '''
@triton.jit
def nearest(x):
    """x to the nearest integer, ties to even."""
    return libdevice.float2int_rn(x)
''',
    "interpreter": '''
@triton.jit
def nearest(x):
    """x ≥ 0 to the nearest integer, ties to even; from 2^23 on every float is one. What it makes of x < 0 is not used."""
    x = tl.maximum(x, 0.0)
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int32)
''',
}

COMMON = '''
@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def up(x):
    """Four ULPs more."""
    return as_float(as_bits(x) + 4)


@triton.jit
def mix(h):
    """MurmurHash3's finalizer."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def random_bits(position, counter, stream):
    """32 bits for each position (uint32)."""
    key = mix(counter.to(tl.uint32, bitcast=True) * 2 + stream)
    return mix(position * 0x9E3779B1 + key)


@triton.jit
def ends(x):
    """Bits of |x| (subnormals as 0), of each group the least nonzero and the greatest, and whether it has negatives."""
    bits = as_bits(x)
    magnitude = bits & 0x7FFFFFFF
    magnitude = tl.where(magnitude < 0x00800000, 0, magnitude)
    high = tl.max(magnitude, 1, keep_dims=True)
    low = tl.min(tl.where(magnitude == 0, 0x7FFFFFFF, magnitude), 1, keep_dims=True)
    negative = (bits < 0) & (magnitude > 0)
    signed = tl.max(negative.to(tl.int32), 1, keep_dims=True)
    return magnitude, tl.minimum(low, high), high, negative, signed
'''

STOCHASTIC = '''
@triton.jit
def round_randomly(position, magnitude, below, above, noise):
    """The position below, or the next with the probability that makes the mean of what is read the value itself."""
    x0 = as_float(below)
    return position + (noise * (as_float(above) - x0) < as_float(magnitude) - x0).to(tl.int32)


@triton.jit
def noise_of(position, counter):
    """Of the 2^16 middles of equal parts of (0, 1)."""
    return ((random_bits(position, counter, 0) >> 16).to(tl.float32) + 0.5) * 1.52587890625e-05
'''

PARAMETER = '''
@triton.jit
def round_parameter(x, position, counter):
    """FP32 to BF16, up with the probability that makes the mean x."""
    noise = (random_bits(position, counter, 1) & 0xFFFF).to(tl.int32)
    bits = as_bits(x)
    rounded = as_float((bits + noise) & -0x10000)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, rounded, x).to(tl.bfloat16)
'''

SPLIT = '''
@triton.jit
def missing_bits(x, high):
    """The 16 bits of x that its BF16 rounding lacks."""
    missing = as_bits(x) - as_bits(high.to(tl.float32))
    missing = tl.minimum(tl.maximum(missing, -0x8000), 0x7FFF)
    return tl.where((as_bits(x) & 0x7FFFFFFF) < 0x7F800000, missing, 0).to(tl.int16)


@triton.jit
def joined(high, low):
    return as_float(as_bits(high.to(tl.float32)) + low.to(tl.int32))
'''


def name_of(how: StateFormat) -> str:
    """How functions of a format are called: "log", "e4m3_linear"."""
    return str(how.nearest()).replace("/", "_")


def helpers_of(how: StateFormat) -> str:
    """The functions encode_<name>[_randomly] and decode_<name> of a format."""
    name = name_of(how)
    if how.code == "log":
        body = _log()
    elif how.linear:
        body = _minifloat(name, MINIFLOATS[how.code]) + _linear(name, MINIFLOATS[how.code])
    else:
        body = _minifloat(name, MINIFLOATS[how.code]) + _expanded(name, MINIFLOATS[how.code])
    return body + _decode(how, name)


def encoder_of(how: StateFormat) -> str:
    """The function encode_<name>, or encode_<name>_randomly where the format is stochastic."""
    name = name_of(how)
    first = int(how.code == "log")
    least = 0 if how.linear or first else 1
    draws = how.stochastic
    head = f"encode_{name}_randomly(x, position, counter)" if draws else f"encode_{name}(x)"
    index = "nearest(t)"
    if draws:
        index = (
            f"round_randomly(t.to(tl.int32), magnitude, bits_{name}(t.to(tl.int32), low, high, signed), "
            f"bits_{name}(t.to(tl.int32) + 1, low, high, signed), noise_of(position, counter))"
        )
    keep = "0, as_float(high)" if how.linear else "as_float(low | (signed << 31)), as_float(high)"
    keep = keep.replace("0, ", "as_float(low * 0), ", 1) if how.linear else keep
    top = "tl.where(signed != 0, 126, 254)" if first else str(MINIFLOATS[how.code].top)
    return f'''
@triton.jit
def {head}:
    """Codes of a tile, and the side data of its groups."""
    magnitude, low, high, negative, signed = ends(x)
    t = position_{name}(magnitude, low, high, signed)
    index = tl.minimum(tl.maximum({index}, {least}), {top}){" + 1" if first else ""}
    code = tl.where(magnitude == 0, 0, index)
    code = code | (negative & (code > 0)).to(tl.int32) * 128
    return code.to(tl.uint8), {keep}
'''


def _log() -> str:
    few, many = LOG_STEPS
    return f"""
@triton.jit
def position_log(magnitude, low, high, signed):
    steps = tl.where(signed != 0, {few}.0, {many}.0)
    span = tl.maximum(high - low, 1)
    return (magnitude - low).to(tl.float32) * tl.div_rn(steps, span.to(tl.float32))


@triton.jit
def bits_log(index, low, high, signed):
    step = up((high - low).to(tl.float32) * tl.where(signed != 0, {1 / few!r}, {1 / many!r}))
    return tl.minimum(low + nearest(index.to(tl.float32) * step), high)
"""


def _minifloat(name: str, of: Minifloat) -> str:
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


def _decode(how: StateFormat, name: str) -> str:
    if how.code == "log":
        sign = "signed != 0"
        index = "magnitude - 1"
    else:
        sign = "magnitude >= 0"
        index = "magnitude"
    magnitude = "tl.where(signed != 0, code & 127, code)" if how.code == "log" else "code & 127"
    return f'''
@triton.jit
def decode_{name}(payload, least, greatest):
    """The values of a tile of codes; nan where a group was not finite."""
    code = payload.to(tl.int32)
    low = as_bits(least)
    signed = (low < 0).to(tl.int32)
    low = low & 0x7FFFFFFF
    magnitude = {magnitude}
    bits = tl.where(magnitude == 0, 0, bits_{name}({index}, low, as_bits(greatest), signed))
    negative = (code >= 128) & ({sign})
    return as_float(bits | (negative.to(tl.int32) << 31)) + (greatest - greatest)
'''
