"""Functions of generated optimizer kernels that load and store tiles, in Triton.

A full tile of [groups, 128] elements of 8 or 16 bits is loaded as words of four elements, [groups, 32]: what is loaded
for the next tile then takes as many registers as it has bits (each element would take one of its own), and a thread has
16 neighbours of each tensor, whatever its type. A tile that is not full is loaded element by element.
"""

from __future__ import annotations

COMMON = '''
@triton.jit
def quad(a, b, c, d):
    """[groups, 32] of each fourth element to [groups, 128]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 128])


@triton.jit
def quarters(x):
    """[groups, 128] to four of [groups, 32], each fourth element of them."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 32, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def load_bytes(pointer, offset, word, inside, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer.to(tl.pointer_type(tl.int32)) + word)
    else:
        return tl.load(pointer + offset, mask=inside, other=0).to(tl.int32)


@triton.jit
def load_shorts(pointer, offset, word, inside, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer.to(tl.pointer_type(tl.int64)) + word)
    else:
        return tl.load(pointer.to(tl.pointer_type(tl.int16)) + offset, mask=inside, other=0).to(tl.int64)


@triton.jit
def store_bytes(pointer, packed, offset, word, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer.to(tl.pointer_type(tl.int32)) + word, packed)
    else:
        tl.store(pointer + offset, packed.to(tl.uint8), mask=inside)


@triton.jit
def store_shorts(pointer, packed, offset, word, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer.to(tl.pointer_type(tl.int64)) + word, packed)
    else:
        tl.store(pointer.to(tl.pointer_type(tl.int16)) + offset, packed.to(tl.int16), mask=inside)


@triton.jit
def unpacked(x, FULL: tl.constexpr):
    """Bytes, as int32."""
    if FULL:
        return quad(x & 255, (x >> 8) & 255, (x >> 16) & 255, (x >> 24) & 255)
    else:
        return x


@triton.jit
def unpacked_high(x, FULL: tl.constexpr):
    """Bytes, each the upper one of an int32."""
    if FULL:
        return quad(x << 24, x << 16, x << 8, x)
    else:
        return x << 24


@triton.jit
def shorts(x, FULL: tl.constexpr):
    """int16, as int32."""
    if FULL:
        low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
        return quad((low << 16) >> 16, low >> 16, (high << 16) >> 16, high >> 16)
    else:
        return x.to(tl.int32)


@triton.jit
def widened(x, FULL: tl.constexpr):
    """BF16 to FP32."""
    low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
    if FULL:
        bits = quad(low << 16, low & -0x10000, high << 16, high & -0x10000)
    else:
        bits = low << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def two(low, high):
    """Two int32 to an int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def packed(x, FULL: tl.constexpr):
    """The lower bytes of int32 to words."""
    if FULL:
        a, b, c, d = quarters(x)
        return word_of_bytes(a, b, c, d)
    else:
        return x


@triton.jit
def packed_high(x, FULL: tl.constexpr):
    """The upper bytes of int32 to words."""
    if FULL:
        a, b, c, d = quarters(x)
        return word_of_high_bytes(a, b, c, d)
    else:
        return x >> 24


@triton.jit
def packed_shorts(x, FULL: tl.constexpr):
    """The lower halves of int32 to words."""
    if FULL:
        a, b, c, d = quarters(x)
        return two((b << 16) | (a & 0xFFFF), (d << 16) | (c & 0xFFFF))
    else:
        return x.to(tl.int64)


@triton.jit
def narrowed(x, FULL: tl.constexpr):
    """FP32 to BF16, in words."""
    if FULL:
        a, b, c, d = quarters(x)
        return two(bf16_pair(a, b), bf16_pair(c, d))
    else:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64)
'''
TRANSPOSED = '''
@triton.jit
def load_shorts_at(pointer, place, inside, FULL: tl.constexpr):
    """Elements of 16 bits that do not lie side by side, in the words of those that do."""
    found = tl.load(pointer.to(tl.pointer_type(tl.int16)) + place, mask=inside, other=0)
    return packed_shorts(found.to(tl.int32), FULL)


@triton.jit
def store_shorts_at(pointer, packed, place, inside, FULL: tl.constexpr):
    tl.store(pointer.to(tl.pointer_type(tl.int16)) + place, shorts(packed, FULL).to(tl.int16), mask=inside)


@triton.jit
def transposed_place(index, rows, columns):
    """Where an element lies of matrices that each lie transposed, by its place in the logical order."""
    matrix = index // (rows * columns)
    row = index // columns - matrix * rows
    return matrix * (rows * columns) + (index % columns) * rows + row
'''
FP16 = '''
@triton.jit
def from_fp16(x, FULL: tl.constexpr):
    """FP16 to FP32."""
    return shorts(x, FULL).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def to_fp16(x, FULL: tl.constexpr):
    """FP32 to FP16, in words."""
    return packed_shorts(x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32), FULL)
'''

PACKING = {
    "cuda": """
@triton.jit
def word_of_bytes(a, b, c, d):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040; "
        "prmt.b32 $0, low, high, 0x5410; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def word_of_high_bytes(a, b, c, d):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0073; prmt.b32 high, $3, $4, 0x0073; "
        "prmt.b32 $0, low, high, 0x5410; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def bf16_pair(a, b):
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )
""",
    "interpreter": """
@triton.jit
def word_of_bytes(a, b, c, d):
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def word_of_high_bytes(a, b, c, d):
    return word_of_bytes(a >> 24, b >> 24, c >> 24, d >> 24)


@triton.jit
def bf16_pair(a, b):
    low, high = a.to(tl.bfloat16).to(tl.int16, bitcast=True), b.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
""",
}
