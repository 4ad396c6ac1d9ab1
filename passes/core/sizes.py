"""What is known of sizes, of which some may be symbolic, without adding a guard."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true  # what guards imply, as torch sees it


def same_sizes(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Return True if two tuples of sizes or strides are known to be equal, however written, without adding guards."""
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b) or statically_known_true(a == b) or _is_guarded(a == b)


def _is_guarded(known: Any) -> bool:
    """Return True if a guard says this of sizes in so many words, which torch does not always see."""
    return isinstance(known, torch.SymBool) and any(
        guard.expr == known.node.expr for guard in known.node.shape_env.guards
    )


def hint(size: Any, unknown: int = 4096) -> int:
    """Return a size as it was when the graph was traced; `unknown` for one that only the data knows."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else unknown
    return int(size)


def count(shape: Iterable[Any]) -> int:
    """Return the number of elements of this shape; symbolic sizes are those that were seen when it was traced."""
    return math.prod(map(hint, shape))


def divides(multiple: int, size: Any) -> bool:
    """Return True if `size` is known to be a multiple of `multiple`, without adding a guard."""
    if isinstance(size, int):
        return size % multiple == 0
    if statically_known_true(size % multiple == 0):
        return True
    seen = hint(size, unknown=1)  # a number in other words: 4 · (32 · s // s)
    return seen % multiple == 0 and _same(size, seen)
