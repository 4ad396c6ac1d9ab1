"""Numbers to codes of FP8, in Triton: the scale of an amax, the quotient, and codes in words of four. Meaning:
`kernels/reference/markers.py`. Kernels that are not generated have them from here."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PTX = (  # as `kernels/codegen/source/helpers.py` has it, which says why
    "{ .reg .b16 lo, hi; .reg .b32 word, high; "
    "cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "cvt.u32.u16 word, lo; cvt.u32.u16 high, hi; shl.b32 high, high, 16; or.b32 $0, word, high; }"
)
TO_E4M3: Any = tl.constexpr(PTX)
TO_E5M2: Any = tl.constexpr(PTX.replace("e4m3", "e5m2"))


@triton.jit
def magnitude(x):
    """Bits of |x|. As integers they are ordered like |x|, with inf above all numbers and nan above inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, POWER_OF_TWO: tl.constexpr, LARGEST: tl.constexpr):  # noqa: N803
    """`markers.scale` of bits of an amax, for a format whose largest number is LARGEST."""
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST)
    scale = tl.where(amax == 0, 1.0, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))
    if POWER_OF_TWO:
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where((scale != scale) | (scale == float("inf")), scale, up)
    return scale


@triton.jit
def quotient(x, scale, inverse, ASSEMBLED: tl.constexpr):  # noqa: N803
    """x / scale to nearest, of |x| that the scale was made of: by its inverse and one correction (Markstein, IBM J. R&D
    34, 1990), in a third of a division's instructions. nan where the scale is nan, or both are inf."""
    if ASSEMBLED:
        finite = tl.where(scale == float("inf"), 0.0, scale)
        near = x * inverse
        found = tl.fma(tl.fma(near, finite, x * -1.0), inverse * -1.0, near)
    else:  # the interpreter's fma rounds twice
        found = tl.div_rn(x, scale)
    return found


@triton.jit
def code(x, LARGEST: tl.constexpr):  # noqa: N803
    """FP32 to bytes of the format with the largest number LARGEST: to nearest even, saturated. For the interpreter."""
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if LARGEST == 448.0:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return code.to(tl.uint32)


@triton.jit
def words_of(a, b, c, d, ASSEMBLED: tl.constexpr):  # noqa: N803
    """Four FP32 tensors to one of words, each four codes of E4M3: to nearest even, saturated; nan stays nan."""
    if ASSEMBLED:
        words = tl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = code(a, 448.0) | (code(b, 448.0) << 8)
        words = (low | (code(c, 448.0) << 16) | (code(d, 448.0) << 24)).to(tl.int32, bitcast=True)
    return words
