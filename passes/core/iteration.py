"""Iteration spaces: where the element that a loop is at lies in each tensor.

A region runs over rows × cols, counted through in row-major order. An `Access` says which element of a tensor belongs
to iteration i: i is taken apart into digits, outermost first, and each digit moves by its stride through the tensor's
elements, counted in row-major order as well. So a view that keeps the order of elements changes nothing, and

    the whole tensor ((N, 1),)     a statistic of rows ((R, 1), (C, 0))     a weight ((R, 0), (C, 1))

Only when a tensor is loaded do its strides in memory come in. Sizes may be symbolic; what cannot be proven is an error,
`NoAccessError`, and the tensor is then computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = Any  # int or torch.SymInt
Access = tuple[tuple[Size, Size], ...]


class NoAccessError(Exception):
    """The element that belongs to an iteration cannot be expressed by digits and strides."""


def same(a: Size, b: Size) -> bool:
    """Return True if two sizes are known to be equal."""
    return a is b or statically_known_true(a == b)


def divides(divisor: Size, n: Size) -> bool:
    """Return True if `divisor` is known to divide `n`."""
    if isinstance(divisor, int) and isinstance(n, int):
        return divisor != 0 and n % divisor == 0
    return same(n, 0) or statically_known_true(n % divisor == 0)


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of sizes."""
    n: Size = 1
    for size in sizes:
        n = n * size
    return n


def contiguous(shape: Sequence[Size]) -> list[Size]:
    """Return row-major strides."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return strides[::-1]


def tidy(access: Access) -> Access:
    """Return the same access in as few digits as possible."""
    out: list[tuple[Size, Size]] = []
    for size, stride in access:
        if same(size, 1):
            continue
        if out and same(out[-1][1], stride * size):
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def whole(rows: Size, cols: Size) -> Access:
    """Return the access by which each iteration has its own element, in order."""
    return tidy(((rows * cols, 1),))


def of_rows(rows: Size, cols: Size) -> Access:
    """Return one element for each row."""
    return tidy(((rows, 1), (cols, 0)))


def equal(a: Access, b: Access) -> bool:
    """Return True if two accesses are the same digit by digit."""
    return len(a) == len(b) and all(same(m, n) for p, q in zip(a, b, strict=True) for m, n in zip(p, q, strict=True))


def by_dimension(access: Access, shape: Sequence[Size]) -> list[tuple[Size, int, Size]]:
    """Return the digits taken apart until each moves along one dimension: (size, dimension, step); -1 for those that
    rest."""
    out: list[tuple[Size, int, Size]] = []
    strides = contiguous(shape)
    for size, stride in access:
        pieces: list[tuple[Size, int, Size]] = []
        while not same(size, 1):
            if same(stride, 0):
                pieces.append((size, -1, 0))
                break
            dim = _dimension(stride, shape, strides)
            step = stride // strides[dim]
            room = shape[dim] // step if divides(step, shape[dim]) else None
            if statically_known_true(size * step <= shape[dim]):
                pieces.append((size, dim, step))
                break
            if room is None or not divides(room, size):
                raise NoAccessError(f"{size} steps of {stride} through a tensor of {list(shape)}")
            pieces.append((room, dim, step))
            size, stride = size // room, stride * room
        out += pieces[::-1]
    return out


def _dimension(stride: Size, shape: Sequence[Size], strides: Sequence[Size]) -> int:
    """Return the dimension along which a step of `stride` elements goes."""
    candidates = [d for d in reversed(range(len(shape))) if not same(shape[d], 1)]
    for dim in candidates:
        last = dim == candidates[-1]
        if divides(strides[dim], stride) and (last or statically_known_true(stride < strides[dim] * shape[dim])):
            return dim
    raise NoAccessError(f"a step of {stride} through a tensor of {list(shape)}")


def broadcast(access: Access, shape: Sequence[Size], source: Sequence[Size]) -> Access:
    """Return the access to a tensor of shape `source` which is broadcast to `shape`."""
    if len(shape) == len(source) and all(same(a, b) for a, b in zip(shape, source, strict=True)):
        return access
    strides = contiguous(source)
    lead = len(shape) - len(source)
    digits = []
    for size, dim, step in by_dimension(access, shape):
        rests = dim < lead or same(source[dim - lead], 1)
        digits.append((size, 0 if rests else strides[dim - lead] * step))
    return tidy(tuple(digits))


def permuted(access: Access, shape: Sequence[Size], dims: Sequence[int]) -> Access:
    """Return the access to a tensor whose dimensions, taken in the order `dims`, give one of `shape`."""
    source: list[Size] = [1] * len(dims)
    for out, dim in enumerate(dims):
        source[dim] = shape[out]
    strides = contiguous(source)
    digits = [(size, 0 if dim < 0 else strides[dims[dim]] * step) for size, dim, step in by_dimension(access, shape)]
    return tidy(tuple(digits))


def in_memory(access: Access, shape: Sequence[Size], strides: Sequence[Size]) -> Access:
    """Return the access with strides in memory instead of element numbers."""
    if all(same(a, b) or same(n, 1) for a, b, n in zip(strides, contiguous(shape), shape, strict=True)):
        return access
    digits = [(size, 0 if dim < 0 else strides[dim] * step) for size, dim, step in by_dimension(access, shape)]
    return tidy(tuple(digits))


def split(access: Access, cols: Size) -> tuple[Access, Access]:
    """Return the digits that rows make up, and those that the `cols` columns do."""
    rest: Size = cols
    inner: list[tuple[Size, Size]] = []
    outer = list(access)
    while outer and not same(rest, 1):
        size, stride = outer.pop()
        if statically_known_true(size <= rest):
            if not divides(size, rest):
                raise NoAccessError(f"digits {access} do not end where a row of {cols} does")
            inner.append((size, stride))
            rest = rest // size
        else:
            if not divides(rest, size):
                raise NoAccessError(f"digits {access} do not end where a row of {cols} does")
            inner.append((rest, stride))
            outer.append((size // rest, stride * rest))
            rest = 1
    if not same(rest, 1):
        inner.append((rest, 0))  # digits of size 1 were dropped
    return tidy(tuple(outer)), tidy(tuple(inner[::-1]))
