"""Optimizer states in 8 bits, in plain torch: what `encode` stores and `decode` gives back.

    payload, side = encode(x, format, counter)        x ≈ decode(payload, side, format)

What holds, for every format of `fp8compile/state_formats.py` (tests/optimizer/test_states.py):

- Zeros are exact, and the least and greatest magnitude of a group (linear: the greatest); so are constant groups.
- In a group with signs, as a first moment's, what lies 2²⁴ and more below the greatest is zero, and not the least: the
  average of an element that gets no gradient any more decays without end, and would leave no codes to the others.
- The relative error of an element is at most half a step of its group: (greatest / least)^(1/126) in `log`.
- Storing what was stored changes no bit of what is read, stochastic or not: the ends are kept as they are, and all
  between them lands within a small part of a step of where it came from.
- Stochastic rounding is unbiased: the mean of what is read is x, not that of its logarithm (to within an FP32 ULP).
- An inf is stored as the greatest FP32 number: a square that overflowed decays again. A group with a nan reads as nan.
- Every operation is an integer's, or of FP32 and rounded once, as by a fused multiply-add (here, by way of FP64): a
  kernel must agree bit for bit.

`log` counts its steps in fixed point, since a kernel that decodes by integers alone does it in half the instructions:
bits = low + floor(code · step), where a step has 7 bits of fraction (8 without a sign).

Random bits are a hash of (position, counter): nothing else is needed to make a step again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8compile.state_formats import GROUP, MINIFLOATS, Minifloat, StateFormat, parse_state_format

LOG_STEPS = 126, 254  # with a sign and without
LOG_FRACTION = {"signed": 7, "unsigned": 8, "narrow": 20}  # bits of a step's fraction: 32 hold a code and it
LOG_NARROW = 2048  # bits of FP32 between least and greatest, below which a step needs more fraction
LOG_LESS = 1 - 2.0**-22
RANGE = 24 << 23  # bits of FP32 below the greatest of a group with signs, from which on it is zero
SIGN, MAGNITUDE = 0x80, 0x7F
INF_BITS = 0x7F800000
GREATEST = torch.finfo(torch.float32).max
MASK = 0xFFFFFFFF
STATE_STREAM, PARAMETER_STREAM = 0, 1
Decoder = Callable[[Tensor], Tensor]
Neighbours = Callable[[Tensor], tuple[Tensor, Tensor]]


# ---- random bits ----------------------------------------------------------------------------------------------------


def mix(h: Tensor) -> Tensor:
    """Return 32 bits (int64 ≥ 0) that all depend on all 32 bits of `h`: MurmurHash3's finalizer."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def random_bits(elements: int, counter: Tensor, stream: int, start: int = 0) -> Tensor:
    """Return 16 random bits (int64 [elements]) of position, counter (int32 [1]) and stream alone: halves of 32.

    start: the position of the first.
    """
    position = torch.arange(start, start + elements, device=counter.device, dtype=torch.int64)
    key = mix((counter.long() * 2 + stream) & MASK)
    h = ((position >> 1) * 0x9E3779B1 + key) & MASK
    h = ((h ^ (h >> 15)) * 0x85EBCA6B) & MASK
    h = h ^ (h >> 16)
    return torch.where(position % 2 == 1, h >> 16, h & 0xFFFF)


# ---- encode ---------------------------------------------------------------------------------------------------------


def encode(
    x: Tensor, format: StateFormat | str, counter: Tensor | None = None, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Return codes of x (uint8, same shape) and side data (FP32 [groups, 2]); stochastic formats need a `counter`.

    start: where x begins in the tensor of which it is a part, which random bits depend on.
    """
    how = parse_state_format(format)
    if how.is_exact:
        return x.float().clone(), x.new_empty((0, 2), dtype=torch.float32)
    grouped = _grouped(x.float())
    magnitude = grouped.abs().clamp_max(GREATEST).view(torch.int32)
    negative = grouped.view(torch.int32) < 0
    high = magnitude.amax(1, keepdim=True)
    signed = negative.any(1, keepdim=True)
    floor = torch.where(signed, high - RANGE, 1).clamp_min(1)
    low = torch.where(magnitude < floor, 0x7FFFFFFF, magnitude).amin(1, keepdim=True).minimum(high)
    if how.stochastic:
        position, top = _positions(how, magnitude, low, high, signed)
        index = _round_randomly(position, magnitude, _neighbours(how, low, high, signed), _noise(x, counter, start))
        first = int(how.code == "log")  # code 0 is zero; the least of a minifloat above it
        code = index.clamp(0 if how.linear or first else 1).minimum(top) + first
    elif how.code == "log":
        position, top = _positions(how, magnitude, low, high, signed)
        code = ((position + 1).round().int() - 1).clamp_min(0).minimum(top) + 1
    else:
        code = _cast(_within(how, magnitude, low, high), how.code)
    if how.linear:
        low, signed = torch.zeros_like(low), torch.zeros_like(signed)
    code = torch.where(magnitude < low.clamp_min(1), 0, code) | negative.int() * SIGN
    side = torch.cat([low | (signed.int() << 31), high], 1).view(torch.float32)
    return code.reshape(-1)[: x.numel()].to(torch.uint8).view(x.shape), side


def _grouped(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _noise(x: Tensor, counter: Tensor | None, start: int) -> Tensor:
    """Return odd multiples of 2⁻¹⁷ in (0, 1)."""
    if counter is None:
        raise ValueError("a stochastic state format needs a counter")
    elements = -(-x.numel() // GROUP) * GROUP
    return (random_bits(elements, counter, STATE_STREAM, start).float().view(-1, GROUP) + 0.5) * 2.0**-16


def _round_randomly(position: Tensor, magnitude: Tensor, neighbours: Neighbours, noise: Tensor) -> Tensor:
    """Return the position below, or the next with the probability that makes the mean of what is read the value."""
    below = position.floor().int()  # of what was stored this may be one less: then x is x1, and always goes up
    x, x0, x1 = (b.view(torch.float32) for b in (magnitude, *neighbours(below)))
    return below + (noise.double() * (x1 - x0).double() + x0.double() < x.double()).int()


def _positions(how: StateFormat, magnitude: Tensor, low: Tensor, high: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each magnitude lies between codes (in `log` from 0: code 0 is zero, 1 the least), and the last."""
    if how.code == "log":
        return _log_positions(how, magnitude, low, high, signed), torch.where(signed, *LOG_STEPS).int()
    to = MINIFLOATS[how.code]
    return _position(_within(how, magnitude, low, high), to), torch.full_like(high, to.top)


def _within(how: StateFormat, magnitude: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return positive numbers in a minifloat's range, as FP32 bits: scaled to it, or stretched to all of it."""
    to = MINIFLOATS[how.code]
    if how.linear:
        finite = magnitude.clamp_max(INF_BITS - 1).view(torch.float32)
        return (finite * _scale(high, to).reciprocal()).view(torch.int32)
    span = (high - low).clamp_min(1)
    per_bit = torch.full_like(span, to.span, dtype=torch.float32) / span.float()
    return ((magnitude - low).float() * per_bit).round().int().clamp(0, to.span) + to.low_bits


def _cast(y: Tensor, code: str) -> Tensor:
    """Return codes of positive numbers (FP32 bits), to nearest even; torch's cast, but none is above the greatest."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[code]
    return y.view(torch.float32).clamp_max(MINIFLOATS[code].max).to(dtype).view(torch.uint8).int()


def _log_positions(how: StateFormat, magnitude: Tensor, low: Tensor, high: Tensor, signed: Tensor) -> Tensor:
    """Return an exact product of two FP32 numbers: it is rounded once, to a code.

    Codes are read rounded down to a bit. Where a step is a few bits, the nearest is found for the middle of one. Where
    it is one bit, middles lie halfway between codes: a little less belongs to the lower.
    """
    step = _LogStep(low, high, signed)
    distance = magnitude.long() - low
    if how.stochastic:
        return distance.float().double() * step.per_bit.double()
    parts = torch.where(high - low < LOG_NARROW, 2, 1)
    distance = distance * parts + (parts - 1)
    return distance.float().double() * (step.per_bit / parts * LOG_LESS).double()


def _position(y: Tensor, to: Minifloat) -> Tensor:
    """Return where a positive number (its FP32 bits) lies between the codes of a minifloat: an integer on a code."""
    below = y.view(torch.float32) * (1.0 / to.tiny)
    above = (y - to.normal_bits).float() * 2.0**-to.shift + to.first_normal
    return torch.where(y < to.normal_bits, below, above)


def _scale(high: Tensor, to: Minifloat) -> Tensor:
    """Return the greatest magnitude / format max, rounded up so that max · scale reaches it."""
    greatest = high.clamp_max(INF_BITS - 1).view(torch.float32)
    return _up(greatest * (1 / to.max)).clamp_min(2.0**-126)


def _up(x: Tensor) -> Tensor:
    """Return four ULPs more: as much as four roundings may have taken."""
    return (x.view(torch.int32) + 4).view(torch.float32)


# ---- decode ---------------------------------------------------------------------------------------------------------


def decode(payload: Tensor, side: Tensor, format: StateFormat | str) -> Tensor:
    """Return FP32 values in the shape of `payload`."""
    how = parse_state_format(format)
    if how.is_exact:
        return payload.clone()
    code = _grouped(payload).int()
    low, high = side.view(torch.int32).unbind(1)
    signed, low, high = (low < 0).unsqueeze(1), (low & 0x7FFFFFFF).unsqueeze(1), high.unsqueeze(1)
    has_sign = signed if how.code == "log" else torch.ones_like(signed)
    negative = has_sign & (code >= SIGN)
    magnitude = torch.where(has_sign, code & MAGNITUDE, code)
    found = torch.where(magnitude == 0, 0, _decoder(how, low, high, signed)(magnitude - int(how.code == "log")))
    x = (found | negative.int() << 31).view(torch.float32)
    x = torch.where(high >= INF_BITS, torch.nan, x)
    return x.reshape(-1)[: payload.numel()].view(payload.shape)


def _decoder(how: StateFormat, low: Tensor, high: Tensor, signed: Tensor) -> Decoder:
    """Return a function of positions to FP32 bits of magnitudes: never above the group's greatest, which is exact."""
    span = (high - low).float()
    if how.code == "log":
        step = _LogStep(low, high, signed)
        return lambda index: (low + step.times(index)).minimum(high)
    of = MINIFLOATS[how.code]
    if how.linear:
        scale = _scale(high, of)
        return lambda code: (_bits_of_code(code, of).view(torch.float32) * scale).view(torch.int32).minimum(high)
    per_bit = _up(span * (1 / of.span))
    return lambda code: (low + ((_bits_of_code(code, of) - of.low_bits).float() * per_bit).round().int()).minimum(high)


def _neighbours(how: StateFormat, low: Tensor, high: Tensor, signed: Tensor) -> Neighbours:
    """Return a function of positions to FP32 bits of their values and the next; in `log` a step rounded down above."""
    decode_bits = _decoder(how, low, high, signed)
    if how.code != "log":
        return lambda index: (decode_bits(index), decode_bits(index + 1))
    step = _LogStep(low, high, signed)

    def neighbours(index: Tensor) -> tuple[Tensor, Tensor]:
        below = low + step.times(index)
        return below, (below + step.whole).minimum(high)

    return neighbours


class _LogStep:
    """A step of `log` in bits of FP32, at least one, in fixed point."""

    def __init__(self, low: Tensor, high: Tensor, signed: Tensor) -> None:
        span = high - low
        narrow, many, few = (LOG_FRACTION[name] for name in ("narrow", "unsigned", "signed"))
        fraction = torch.where(span < LOG_NARROW, narrow, torch.where(signed, few, many))
        steps = torch.where(signed, *LOG_STEPS).float()
        per_bit = torch.ones_like(steps) / steps * torch.exp2(fraction.float())
        self.step = (_up(span.float() * per_bit).long() + 1).maximum(1 << fraction)
        self.per_bit = torch.exp2(fraction.float()) / self.step.float()  # steps in a bit
        self.unit = 1 << (32 - fraction)
        self.whole = (self.step >> fraction).int()

    def times(self, index: Tensor) -> Tensor:
        """Return `index` steps, in bits of FP32: the upper half of a product of 64 bits."""
        return ((index * self.unit * self.step) >> 32).int()


def _bits_of_code(code: Tensor, of: Minifloat) -> Tensor:
    subnormal = (code.float() * of.tiny).view(torch.int32)
    normal = (code << of.shift) + (of.normal_bits - (of.first_normal << of.shift))
    return torch.where(code < of.first_normal, subnormal, normal)


# ---- parameters -----------------------------------------------------------------------------------------------------


def round_stochastically(x: Tensor, counter: Tensor) -> Tensor:
    """Return x (FP32) in BF16, up with the probability that makes the result's mean x; inf and nan as in a cast."""
    raw = x.contiguous().view(torch.int32)
    noise = random_bits(x.numel(), counter, PARAMETER_STREAM).int().view(x.shape)
    rounded = ((raw + noise) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (FP32) in BF16, to nearest even, and the 16 bits (int16) that are missing.

    65,537 FP32 numbers round to an even BF16 number (both ties do) and 16 bits know 65,536: the upper tie is kept as
    its lower neighbour, 2⁻²⁴ of it away. All else is exact, and the BF16 number always is what FP32 rounds to.
    """
    high = x.to(torch.bfloat16)
    missing = x.contiguous().view(torch.int32) - high.float().view(torch.int32)
    low = torch.where(x.isfinite(), missing.clamp(-0x8000, 0x7FFF), 0)
    return high, low.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the FP32 number that `split` took apart."""
    return (high.float().view(torch.int32) + low.int()).view(torch.float32)
