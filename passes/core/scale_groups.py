"""Scale groups: into which groups of features a value can be cast, for which each has a scale of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import value
from fp8compile.passes.core.sizes import divides, hint

GROUPS = (128, 64, 32, 16)


def dense_order(x: torch.Tensor) -> list[int]:
    """Return the dimensions of `x` as they lie in memory, outermost first; in their own order where any repeats."""
    strides = [hint(s) for s in x.stride()]
    if 0 in strides:
        return list(range(x.dim()))
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def group_of_tensor(x: torch.Tensor, merged: int = 1) -> tuple[int | None, int]:
    """Return the largest group that divides the innermost dimension (the features), or the product of several."""
    length: Any = 1
    for d in dense_order(x)[-merged:]:
        length = length * x.shape[d]
    return next((g for g in GROUPS if divides(g, length)), None), merged


def group_of(node: fx.Node) -> tuple[int | None, int]:
    """Return the group of `node`. Where its rows are pixels, those of one channel may make groups together."""
    x = value(node)
    found = group_of_tensor(x)
    order = dense_order(x)
    if found[0] is None and _is_image(node) and x.permute(order).is_contiguous() and order[:2] == [0, 1]:
        return group_of_tensor(x, x.dim() - 2)
    return found


def _is_image(node: fx.Node) -> bool:
    """Return True if a convolution makes `node` or reads it: [batch, channels, *pixels]."""
    near = [fusible.made_at(node), *node.users]
    return value(node).dim() >= 3 and any(operators.is_convolution(n.target) for n in near)
