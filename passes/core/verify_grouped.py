"""Rules of grouped FP8 matmuls, a part of `passes/core/verify.py`.

- the groups are int32 numbers, and the scales are those of rows: of each row of a, and of each matrix of b; or, where
  groups are what is contracted, of each row of each group
- groups that are contracted come from `fp8.grouped_cast`, or from outside; data, scale and ends of one such cast, or of
  two with the same groups
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.formats import ALIGNMENT, FP8_DTYPES
from fp8compile.passes.core.compilation import value
from fp8compile.passes.core.marker_views import GroupedPart, ScaledMM
from fp8compile.passes.core.sizes import divides, same_sizes


def contracts_groups(mm: ScaledMM) -> bool:
    """Return True for a matmul that contracts the columns of each group."""
    return mm.offs is not None and value(mm.b).dim() == 2


def wrong_groups(mm: ScaledMM) -> str:
    """Return the rule that the groups of a matmul break; "" if they break none."""
    assert mm.offs is not None
    a, b, offs, how = value(mm.a), value(mm.b), value(mm.offs), {mm.granularity_a, mm.granularity_b}
    if offs.dtype != torch.int32:
        return f"its groups end at {offs.dtype} numbers, not int32"
    if how != {"row"}:
        return f"its groups have scales of {' and '.join(sorted(how))}, not of rows"
    if contracts_groups(mm):
        return _wrong_contraction(mm, mm.offs)
    if (a.dim(), b.dim(), offs.dim()) != (2, 3, 1) or not same_sizes(offs.shape, b.shape[:1]):
        return f"groups {list(offs.shape)} of {list(a.shape)} for {list(b.shape)}"
    return ""


def _wrong_contraction(mm: ScaledMM, offs: fx.Node) -> str:
    a, b, groups = value(mm.a), value(mm.b), value(offs).shape
    if not same_sizes(a.shape[-1:], b.shape[-1:]) or not divides(ALIGNMENT, a.shape[-1]):
        return f"contracts groups of {a.shape[-1]} with those of {b.shape[-1]} elements, multiples of {ALIGNMENT}"
    if not divides(ALIGNMENT, b.shape[0]):
        return f"N {b.shape[0]} is not a multiple of {ALIGNMENT}"
    for data, scale in ((mm.a, mm.scale_a), (mm.b, mm.scale_b)):
        if value(data).dtype not in FP8_DTYPES or value(data).dim() != 2:
            return f"%{data.name} is {value(data).dtype} of {list(value(data).shape)}, no groups of FP8"
        wanted = [*groups, value(data).shape[0], 1]
        if not same_sizes(value(scale).shape, wanted):
            return f"%{scale.name} has shape {list(value(scale).shape)}, rows of groups of %{data.name} need {wanted}"
        parts = [GroupedPart.of(node) for node in (data, scale)]
        if any(parts) and len({part and part.cast.node for part in parts}) > 1:
            return f"%{data.name} was not made with %{scale.name}"
    ends = {part.cast.offs for node in (mm.a, mm.b, offs) if (part := GroupedPart.of(node)) is not None}
    return "" if len(ends) < 2 else f"contracts groups that end at {' and '.join(sorted(f'%{n.name}' for n in ends))}"
