"""Parameters that are dense but not contiguous, as batches of matrices that each lie transposed.

    channels last    [n, c, h, w] lies as [n, h, w, c]: n matrices of c rows and h · w columns
    x.t()            one matrix

Codes of states lie in the logical order of their parameter, whatever its memory order.
"""

from __future__ import annotations

import math

from torch import Tensor

LARGEST = 2**31  # elements: places are computed in 32 bits


def transposed_matrices(x: Tensor) -> tuple[int, int] | None:
    """Return rows and columns of the matrices of which `x` consists, each of them transposed; (1, 1) of a contiguous
    tensor, None of any other."""
    dims = [d for d, size in enumerate(x.shape) if size != 1]
    sizes = [x.shape[d] for d in dims]
    order = sorted(range(len(dims)), key=lambda i: -x.stride(dims[i]))
    if not x.numel() or x.numel() >= LARGEST or not _is_dense([(x.shape[dims[i]], x.stride(dims[i])) for i in order]):
        return None
    batch = next((i for i, at in enumerate(order) if i != at), len(order))
    rest = order[batch:]
    if not rest:
        return 1, 1
    rows = rest[0] - batch  # how many dimensions the rows have
    if rest != [*range(batch + rows, len(order)), *range(batch, batch + rows)]:
        return None
    return math.prod(sizes[batch : batch + rows]), math.prod(sizes[batch + rows :])


def _is_dense(dims: list[tuple[int, int]]) -> bool:
    """Return True if sizes and strides, the largest stride first, leave no gap and meet no element twice."""
    expected = 1
    for size, stride in reversed(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def lies_as(x: Tensor, other: Tensor) -> bool:
    """Return True if the elements of two tensors of one shape lie in the same order."""
    mine, theirs = x.stride(), other.stride()
    return mine == theirs or all(a == b for a, b, size in zip(mine, theirs, x.shape, strict=True) if size != 1)
