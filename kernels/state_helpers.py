"""Functions of generated optimizer kernels, in Triton: `kernels/state_reference.py`, operation by operation.

A tile is [groups, 128], what belongs to a group is [groups, 1]. Everything is an integer operation or one correctly
rounded FP32 operation (kernels are launched without contraction to fused multiply-adds), so codes agree bit for bit.
"""

from __future__ import annotations

from fp8compile.kernels.state_reference import LOG_FRACTION, LOG_NARROW, LOG_STEPS
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
    """x ≥ 0 to the nearest integer, ties to even; from 2^23 on every float is one. Of x < 0 nothing is used."""
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
    """16 random bits for each position (uint32): halves of 32, which two neighbours share."""
    h = (position >> 1) * 0x9E3779B1 + mix(counter.to(tl.uint32, bitcast=True) * 2 + stream)
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    h = h ^ (h >> 16)
    return tl.where((position & 1) != 0, h >> 16, h & 0xFFFF).to(tl.int32)


@triton.jit
def ends(x, POSITIVE: tl.constexpr):
    """Bits of x and of |x|, of each group the least nonzero and the greatest, and whether it has signs.

    POSITIVE: nothing has a sign; what has one all the same makes its group nan.
    """
    bits = as_bits(x)
    if POSITIVE:
        high = tl.max(bits.to(tl.uint32, bitcast=True), 1, keep_dims=True).to(tl.int32, bitcast=True)
        high = tl.where(high < 0, 0x7FC00000, high)
        low = tl.min((bits - 1).to(tl.uint32, bitcast=True), 1, keep_dims=True).to(tl.int32, bitcast=True) + 1
        return bits, bits, low, high, high * 0
    magnitude = bits & 0x7FFFFFFF
    high = tl.max(magnitude, 1, keep_dims=True)
    before = (magnitude - 1).to(tl.uint32, bitcast=True)  # of zero the greatest there is
    low = tl.min(before, 1, keep_dims=True).to(tl.int32, bitcast=True) + 1
    signed = (tl.min(bits, 1, keep_dims=True) < 0).to(tl.int32)
    return bits, magnitude, low, high, signed


@triton.jit
def side_of(least, greatest):
    """Both ends of each group (bits of FP32) in one 64-bit word, which a little-endian memory has in this order."""
    word = (greatest.to(tl.int64) << 32) | (least.to(tl.int64) & 0xFFFFFFFF)
    return tl.reshape(word, [least.shape[0]])


@triton.jit
def finished(code, bits, magnitude, high, POSITIVE: tl.constexpr):
    """The byte of a code: with its sign, zero for zero (but in a group that is not finite, which has none)."""
    code = tl.where(magnitude == 0, (high >= 0x7F800000).to(tl.int32), code)
    if not POSITIVE:
        code = code | ((bits >> 24) & 128)
    return code.to(tl.uint8)
'''

STOCHASTIC = '''
@triton.jit
def goes_up(magnitude, below, above, position, counter):
    """Whether a value is rounded up: with the probability that makes the mean of what is read the value itself."""
    noise = as_float((random_bits(position, counter, 0) << 7) | 0x3F800040) - 1.0
    x0 = as_float(below)
    return (noise * (as_float(above) - x0) < as_float(magnitude) - x0).to(tl.int32)


@triton.jit
def below_of(t):
    """The position below in the lower 22 bits: t - 1/2 to nearest."""
    return as_bits((t - 0.5) + 12582912.0)
'''

PARAMETER = '''
@triton.jit
def round_parameter(x, position, counter):
    """FP32 to BF16, up with the probability that makes the mean x."""
    noise = random_bits(position, counter, 1)
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
    is_log = how.code == "log"
    given = "x, position, counter" if how.stochastic else "x"
    head = f"encode_{name}{'_randomly' if how.stochastic else ''}({given}, POSITIVE: tl.constexpr)"
    lines = ["bits, magnitude, low, high, signed = ends(x, POSITIVE)"]
    lines.append(f"t = position_{name}(magnitude, low, high, signed)")
    offset = "" if is_log else " - 0x4B400000"  # the bits of 1.5 · 2^23: none of them is in the byte of a code
    if how.stochastic:
        lines += [f"k = below_of(t){offset}", f"below, above = neighbours_{name}(k, low, high, signed)"]
        lines.append("index = k + goes_up(magnitude, below, above, position, counter)")
    else:
        lines.append(f"index = as_bits(t + 12582912.0){offset}")
    if is_log:  # a position lies in [0, steps]: there is nothing to clamp
        lines.append("index = index + 1")
    else:
        lines.append(f"index = tl.minimum(tl.maximum(index, {int(not how.linear)}), {MINIFLOATS[how.code].top})")
    least = "low * 0" if how.linear else "low | (signed << 31)"
    lines.append(f"return finished(index, bits, magnitude, high, POSITIVE), side_of({least}, high)")
    body = "\n".join(f"    {line}" for line in lines)
    return f'''
@triton.jit
def {head}:
    """Codes of a tile, and the side data of its groups."""
{body}
'''


def _log() -> str:
    few, many = LOG_STEPS
    bits = LOG_FRACTION
    units = {how: 1 << (32 - fraction) for how, fraction in bits.items()}
    return f"""
@triton.jit
def chosen(span, signed, narrow, few, many):
    return tl.where(span < {LOG_NARROW}, narrow, tl.where(signed != 0, few, many))


@triton.jit
def step_log(low, high, signed):
    '''A step in bits of FP32, in fixed point; its bits of fraction; and the unit of codes.'''
    span = high - low
    fraction = chosen(span, signed, {bits["narrow"]}, {bits["signed"]}, {bits["unsigned"]})
    per_bit = tl.where(signed != 0, {1 / few!r}, {1 / many!r}) * as_float((fraction + 127) << 23)
    exact = as_float(as_bits(span.to(tl.float32) * per_bit) + 4)
    step = tl.maximum(exact.to(tl.uint32) + 1, (1 << fraction).to(tl.uint32))
    return step, fraction


@triton.jit
def unit_log(low, high, signed):
    '''What a code is in fixed point, and minus that: chosen apart, so that the compiler keeps a · b + c together.'''
    unit = chosen(high - low, signed, {units["narrow"]}, {units["signed"]}, {units["unsigned"]})
    minus = chosen(high - low, signed, -{units["narrow"]}, -{units["signed"]}, -{units["unsigned"]})
    return unit, minus


@triton.jit
def steps_log(units, step):
    return tl.umulhi(units.to(tl.uint32, bitcast=True), step).to(tl.int32, bitcast=True)


@triton.jit
def position_log(magnitude, low, high, signed):
    step, fraction = step_log(low, high, signed)
    per_half_bit = tl.div_rn(as_float((fraction + 126) << 23), step.to(tl.float32))
    middle = magnitude * 2 + (1 - low * 2)  # in half bits, of which there are up to 2^32
    return middle.to(tl.uint32, bitcast=True).to(tl.float32) * per_half_bit


@triton.jit
def neighbours_log(k, low, high, signed):
    step, fraction = step_log(low, high, signed)
    unit, minus = unit_log(low, high, signed)
    below = low + steps_log(k * unit, step)
    return below, tl.minimum(below + (step >> fraction.to(tl.uint32)).to(tl.int32, bitcast=True), high)
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


@triton.jit
def neighbours_{name}(k, low, high, signed):
    return bits_{name}(k, low, high, signed), bits_{name}(k + 1, low, high, signed)
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


@triton.jit
def neighbours_{name}(k, low, high, signed):
    return bits_{name}(k, low, high, signed), bits_{name}(k + 1, low, high, signed)
"""


def _decode(how: StateFormat, name: str) -> str:
    if how.code == "log":
        return _DECODE_LOG
    return f'''
@triton.jit
def decode_{name}(payload, side, POSITIVE: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite."""
    code = payload.to(tl.int32)
    magnitude = code & 127
    low, high = side.to(tl.int32), (side >> 32).to(tl.int32)
    nan = tl.where(high >= 0x7F800000, 0x7FC00000, 0)
    bits = bits_{name}(magnitude, low & 0x7FFFFFFF, high, 0)
    return as_float(tl.where(magnitude == 0, 0, bits) | ((code & 128) << 24) | nan)
'''


_DECODE_LOG = '''
@triton.jit
def decode_log(payload, side, POSITIVE: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite, which has no code 0.

    POSITIVE: no group has signs; one that has some all the same is nan.
    """
    code = payload.to(tl.int32)
    low, high = side.to(tl.int32), (side >> 32).to(tl.int32)
    signed = (low < 0).to(tl.int32)
    low = low & 0x7FFFFFFF
    is_finite = high < 0x7F800000
    if POSITIVE:
        is_finite = is_finite & (signed == 0)
        signed = signed * 0
    low = tl.where(is_finite, low, 0x7FC00000)
    high = tl.where(is_finite, high, 0x7FC00000)
    step, fraction = step_log(low, high, signed)
    unit, minus = unit_log(low, high, signed)
    magnitude = code
    if not POSITIVE:
        magnitude = code & (255 - (signed << 7))
    bits = tl.where(magnitude == 0, 0, tl.minimum(low + steps_log(magnitude * unit + minus, step), high))
    if not POSITIVE:
        bits = bits | ((code << 24) & (0 - (signed << 31)))
    return as_float(bits)
'''
