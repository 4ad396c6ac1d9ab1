"""Functions of generated optimizer kernels for states in `log`: `kernels/reference/state_reference.py`, operation by
operation.

Every integer and FP32 operation counts here, as they bound the kernel rather than memory does:

- A code is found and read in fixed point, by one product and one sum each.
- Zeros need no comparison. Stored, they are what lies farthest above the greatest, and are limited to the step beyond
  it, whose code is 256 (128 where there are signs): no bit of it is in the byte. Read, code 0 is limited to 0.
"""

from __future__ import annotations

from fp8compile.kernels.reference.state_reference import LOG_FRACTION, LOG_LESS, LOG_NARROW, LOG_STEPS

ONE = 12582913.0  # 1.5 · 2^23 + 1: a sum with it is rounded to an integer, the lower bits of its FP32 bits
FEW, MANY = LOG_STEPS

COMMON = f"""
@triton.jit
def step_log(low, high, signed):
    '''A step in bits of FP32, in fixed point; and its bits of fraction.'''
    span = high - low
    wide = tl.where(signed != 0, {LOG_FRACTION["signed"]}, {LOG_FRACTION["unsigned"]})
    fraction = tl.where(span < {LOG_NARROW}, {LOG_FRACTION["narrow"]}, wide)
    per_bit = tl.where(signed != 0, {1 / FEW!r}, {1 / MANY!r}) * as_float((fraction + 127) << 23)
    exact = as_float(as_bits(span.to(tl.float32) * per_bit) + 4)
    step = tl.maximum(exact.to(tl.uint32) + 1, (1 << fraction).to(tl.uint32))
    return step, fraction


@triton.jit
def unit_log(fraction):
    '''Return a code in fixed point.'''
    return tl.full(fraction.shape, 1, tl.int32) << (32 - fraction)


@triton.jit
def kept_log(signed):
    '''Which bits of four bytes are a code: all but signs.'''
    return tl.where(signed != 0, 0x7F7F7F7F, -1)


@triton.jit
def distance_log(magnitude, low, unit, step, fraction, signed, NEAREST: tl.constexpr):
    '''Bits above the least as FP32, and how many steps a bit is. In narrow groups it is half bits instead.

    NEAREST: the middle of a bit. One that is stored (a position rounded down to a bit) then lies next to its code.
    '''
    parts = tl.where(fraction == {LOG_FRACTION["narrow"]}, 2, 1)
    least = tl.maximum(low, 1)  # zeros lie below it also where nothing else is
    distance = scaled(magnitude, parts, (parts - 1 if NEAREST else 0) - least * parts)
    beyond = tl.where(signed != 0, {FEW + 1}, {MANY + 1}) * unit
    if not NEAREST:
        beyond += unit >> 1
    distance = tl.minimum(distance, tl.umulhi((beyond * parts).to(tl.uint32, bitcast=True), step))
    return distance.to(tl.float32), as_float((fraction + 128 - parts) << 23) * inverse(step.to(tl.float32))
"""

DECODE = '''
@triton.jit
def decode_log(payload, side, POSITIVE: tl.constexpr, FULL: tl.constexpr):
    """The values of a tile of codes; nan where a group was not finite.

    POSITIVE: no group has signs; one that has some all the same is nan.
    """
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
    unit = unit_log(fraction)
    code = unpacked(payload if POSITIVE else payload & kept_log(signed), FULL)
    bits = tl.minimum(linear(code, unit, -unit, step, low), high.to(tl.uint32, bitcast=True))
    bound = scaled(code, 0x7FFFFFFF, tl.where(is_finite, 0, -1))  # 0 of code 0, else more than any bits
    bits = tl.minimum(bits, bound).to(tl.int32, bitcast=True)
    if not POSITIVE:
        bits = chosen_bits(bits, unpacked_high(payload, FULL), kept_log(signed) | 0x7FFFFFFF)
    return as_float(bits)
'''

NEAREST = f"""
distance, per_part = distance_log(magnitude, low, unit, step, fraction, signed, True)
code = to_nearest(distance, per_part * {LOG_LESS!r}, {ONE})
"""

STOCHASTIC = f"""
distance, per_part = distance_log(magnitude, low, unit, step, fraction, signed, False)
code = downwards(distance, per_part, {ONE})
below = linear(code, unit, -unit, step, low)
above = tl.minimum(below + (step >> fraction.to(tl.uint32)), high.to(tl.uint32, bitcast=True))
code = code + goes_up(magnitude, below, above, pair, odd, counter)
"""


def encoder(stochastic: bool) -> list[str]:
    """Return lines that make codes of the results of `ends`. A code is a position between the ends, and one."""
    return [
        "step, fraction = step_log(low, high, signed)",
        "unit = unit_log(fraction)",
        *(STOCHASTIC if stochastic else NEAREST).strip().splitlines(),
        "code = packed(code, FULL)",
        "if not POSITIVE:",
        "    code = chosen_bits(code, packed_high(bits, FULL), kept_log(signed))",
        "return code, side_of(low | (signed << 31), high)",
    ]
