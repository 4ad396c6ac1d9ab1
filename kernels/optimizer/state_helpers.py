"""Functions of generated optimizer kernels, in Triton: `kernels/reference/state_reference.py`, operation by operation.

A tile is [groups, 128], what belongs to a group is [groups, 1]. Everything is an integer operation or one correctly
rounded FP32 operation (kernels are launched without contraction to fused multiply-adds), so codes agree bit for bit.
"""

from __future__ import annotations

from fp8compile.kernels.optimizer import log_helpers, minifloat_helpers
from fp8compile.kernels.reference.state_reference import GREATEST, RANGE
from fp8compile.state_formats import StateFormat

ROUNDING = {
    "cuda": '''
@triton.jit
def nearest(x):
    """x to the nearest integer, ties to even."""
    return libdevice.float2int_rn(x)


@triton.jit
def to_nearest(a, b, base):
    """a · b + base, rounded once; where `base` is 1.5 · 2^23 and a little, the lower 22 bits are an integer."""
    return as_bits(tl.fma(a, b, base))


@triton.jit
def fma_down(a, b, c):
    """a · b + c rounded down; libdevice's takes denormal numbers for zeros."""
    return tl.inline_asm_elementwise(
        "fma.rm.f32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def downwards(a, b, base):
    """`to_nearest`, rounded down."""
    return as_bits(fma_down(a, b, base))


@triton.jit
def lies_below(noise, width, x0, x):
    """1 where x0 + noise · width < x, exactly, as x is itself what the left may be rounded down to; else 0."""
    return (as_bits(fma_down(noise, width, x0) - x).to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)


@triton.jit
def inverse(x):
    """1 / x of a normal x, correctly rounded: as the hardware's library does it, without its branch for other x."""
    near = fast_reciprocal(x)
    return tl.fma(near, tl.fma(near, x * -1.0, 1.0), near)


@triton.jit
def scaled(x, factor, more):
    """x · factor + more, in one instruction also where the compiler knows the factor to be a power of two."""
    return tl.inline_asm_elementwise(
        "mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, more], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def linear(code, unit, minus, step, low):
    """low + floor((code · unit + minus) · step / 2^32); the sum outside, where it may join a minimum."""
    high = tl.inline_asm_elementwise(
        "{ .reg .b32 index, lower; .reg .b64 both; mad.lo.u32 index, $1, $2, $3; mul.wide.u32 both, index, $4;"
        " mov.b64 {lower, $0}, both; }",
        "=r,r,r,r,r", [code, unit, minus, step], dtype=tl.uint32, is_pure=True, pack=1,
    )
    return high + low.to(tl.uint32, bitcast=True)


@triton.jit
def chosen_bits(x, y, which):
    """The bits of x where those of `which` are set, elsewhere those of y."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xE2;", "=r,r,r,r", [x, which, y], dtype=tl.int32, is_pure=True, pack=1
    )
''',
    "interpreter": '''
@triton.jit
def nearest(x):
    """x ≥ 0 to the nearest integer, ties to even; from 2^23 on every float is one. Of x < 0 nothing is used."""
    x = tl.maximum(x, 0.0)
    return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int32)


@triton.jit
def to_nearest(a, b, base):
    """The bits of a · b + base, rounded once: the product is exact in FP64."""
    sum = a.to(tl.float64) * b.to(tl.float64) + (base - 12582912.0)
    return ((sum + 6755399441055744.0) - 6755399441055744.0).to(tl.int32) + 0x4B400000


@triton.jit
def downwards(a, b, base):
    """`to_nearest`, rounded down."""
    return tl.floor(a.to(tl.float64) * b.to(tl.float64) + (base - 12582912.0)).to(tl.int32) + 0x4B400000


@triton.jit
def lies_below(noise, width, x0, x):
    """1 where x0 + noise · width < x, else 0: in FP64 that is exact."""
    return (noise.to(tl.float64) * width.to(tl.float64) + x0.to(tl.float64) < x.to(tl.float64)).to(tl.int32)


@triton.jit
def inverse(x):
    """1 / x, correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def scaled(x, factor, more):
    """x · factor + more."""
    return (x * factor + more).to(tl.uint32, bitcast=True)


@triton.jit
def linear(code, unit, minus, step, low):
    """low + floor((code · unit + minus) · step / 2^32)."""
    return tl.umulhi(scaled(code, unit, minus), step) + low.to(tl.uint32, bitcast=True)


@triton.jit
def chosen_bits(x, y, which):
    """The bits of x where those of `which` are set, elsewhere those of y."""
    return (x & which) | (y & ~which)
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
def random_bits(pair, odd, counter, stream, ABOVE: tl.constexpr):
    """16 random bits for each position, below those of ABOVE: halves of 32, which two neighbours share."""
    h = pair * 0x9E3779B1 + mix(counter.to(tl.uint32, bitcast=True) * 2 + stream)
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    high = (h >> 16) + (ABOVE << 16)
    return tl.where(odd, high, high ^ (h & 0xFFFF)).to(tl.int32, bitcast=True)


@triton.jit
def saturated(x):
    """The greatest FP32 number for inf; nan stays nan."""
    return tl.minimum(x, GREATEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ends(x, POSITIVE: tl.constexpr):
    """Bits of x and of |x|, of each group the least that is not stored as zero and the greatest, and whether it has
    signs.

    POSITIVE: nothing has a sign; what has one all the same makes its group nan.
    """
    if POSITIVE:
        bits = as_bits(saturated(x))
        high = tl.max(bits.to(tl.uint32, bitcast=True), 1, keep_dims=True).to(tl.int32, bitcast=True)
        high = tl.where(high < 0, 0x7FC00000, high)
        low = tl.min((bits - 1).to(tl.uint32, bitcast=True), 1, keep_dims=True).to(tl.int32, bitcast=True) + 1
        return bits, bits, low, high, high * 0
    bits, magnitude = as_bits(x), as_bits(saturated(tl.abs(x)))
    high = tl.max(magnitude, 1, keep_dims=True)
    signed = (tl.min(bits, 1, keep_dims=True) < 0).to(tl.int32)
    floor = tl.maximum(tl.where(signed != 0, high - RANGE_OF_SIGNED, 1), 1)
    above = (magnitude - floor).to(tl.uint32, bitcast=True)  # of what is zero the greatest there is
    low = tl.min(above, 1, keep_dims=True).to(tl.int32, bitcast=True) + floor
    return bits, magnitude, low, high, signed


@triton.jit
def side_of(least, greatest):
    """Both ends of each group (bits of FP32) in one 64-bit word, which a little-endian memory has in this order."""
    word = (greatest.to(tl.int64) << 32) | (least.to(tl.int64) & 0xFFFFFFFF)
    return tl.reshape(word, [least.shape[0]])
'''.replace("RANGE_OF_SIGNED", repr(RANGE)).replace("GREATEST", repr(GREATEST))

APPROXIMATIONS = """
@triton.jit
def fast_sqrt(x):
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
"""

STOCHASTIC = '''
@triton.jit
def noise_of(pair, odd, counter):
    """Odd multiples of 2^-17 in (0, 1): 16 bits under the 7 of 2^23, scaled and shifted, both exactly."""
    return tl.fma(as_float(random_bits(pair, odd, counter, 0, 0x4B00)), 1.52587890625e-05, -127.99999237060547)


@triton.jit
def goes_up(magnitude, below, above, pair, odd, counter):
    """1 where a value is rounded up, with the probability that makes the mean of what is read the value; else 0."""
    x0 = as_float(below)
    return lies_below(noise_of(pair, odd, counter), as_float(above) - x0, x0, as_float(magnitude))
'''

PARAMETER = '''
@triton.jit
def round_parameter(x, pair, odd, counter):
    """FP32 to numbers of BF16, up with the probability that makes the mean x."""
    noise = random_bits(pair, odd, counter, 1, 0)
    bits = as_bits(x)
    rounded = as_float((bits + noise) & -0x10000)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, rounded, x)
'''

SPLIT = '''
@triton.jit
def missing_bits(x):
    """The 16 bits of x that its BF16 rounding lacks."""
    missing = as_bits(x) - as_bits(x.to(tl.bfloat16).to(tl.float32))
    missing = tl.minimum(tl.maximum(missing, -0x8000), 0x7FFF)
    return tl.where((as_bits(x) & 0x7FFFFFFF) < 0x7F800000, missing, 0)


@triton.jit
def joined(high, low):
    return as_float(as_bits(high) + low)
'''


def name_of(how: StateFormat) -> str:
    """Return the name of a format in those of its functions: "log", "e4m3_linear"."""
    return str(how.nearest()).replace("/", "_")


def helpers_of(how: StateFormat, target: str) -> str:
    """Return the functions that encode_<name>[_randomly] of a format calls, and decode_<name>."""
    name = name_of(how)
    if how.code == "log":
        return log_helpers.COMMON + log_helpers.DECODE
    return minifloat_helpers.functions(how, name, target)


def encoder_of(how: StateFormat) -> str:
    """Return the function encode_<name>, or encode_<name>_randomly where the format is stochastic."""
    name = name_of(how)
    lines = log_helpers.encoder(how.stochastic) if how.code == "log" else minifloat_helpers.encoder(how, name)
    given = "x, pair, odd, counter" if how.stochastic else "x"
    head = f"encode_{name}{'_randomly' if how.stochastic else ''}({given}, POSITIVE: tl.constexpr, FULL: tl.constexpr)"
    body = "\n".join(f"    {line}" for line in ("bits, magnitude, low, high, signed = ends(x, POSITIVE)", *lines))
    return f'''
@triton.jit
def {head}:
    """Codes of a tile, and the side data of its groups."""
{body}
'''
