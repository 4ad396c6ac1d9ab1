"""Repeated values: the sines and cosines of a small tensor that many elements share are computed once, and loaded.

    %cos [1, s, d] = convert(mul(cos(%angle), 1.0), bf16)        read by mul(%q [b, h, s, d], %cos)

A region computes again what it reads from lower levels, which costs nothing as a rule: it waits for memory. A rotary
embedding would so compute its cosines b·h times, and each is a routine of its own, with a slow path for large angles.
What follows them and is as small (here the scaling and the conversion) is computed with them. Where nothing is cast,
Inductor has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.save.saved_forms import count

SLOW = {aten.sin.default, aten.cos.default}
LEAST_COPIES = 8


def is_repeated(node: fx.Node) -> bool:
    """Return True if `node` is such a value: the last small one, of which larger ones are made."""
    if not fusible.is_pointwise(node) or value(node).dtype not in fusible.FLOATS:
        return False
    sizes = value(node).shape
    if not all(isinstance(n, int) for n in sizes) or sum(n > 1 for n in sizes) < 2 or sizes[-1] == 1:
        return False  # a program computes what its rows or columns share once
    return any(_copies(user, node) >= LEAST_COPIES for user in _readers(node)) and _is_made_of_slow(node)


def _is_made_of_slow(node: fx.Node) -> bool:
    """Return True if something slow of the same size is on the way to `node`."""
    while True:
        if node.target in SLOW:
            return True
        same = [i for i in node.all_input_nodes if is_tensor(i) and fusible.same_elements(i, node)]
        if len(same) != 1 or not fusible.is_fusible(node):
            return False
        node = same[0]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield who reads `node`, looking through views."""
    for user in node.users:
        if user.target in fusible.LAYOUTS:
            yield from _readers(user)
        else:
            yield user


def _copies(user: fx.Node, node: fx.Node) -> int:
    """Return how many elements of `user` there are for each of `node`; with symbolic sizes, as the compiler saw
    them."""
    if not is_tensor(user) or not fusible.is_pointwise(user):
        return 0
    return count(value(user).shape) // max(count(value(node).shape), 1)
