"""The losses of casts in training, as sums: of a cast as it is, and of `ALTERNATIVES` in its place.

    extremes(tensors, scale, format)      largest magnitude; elements so far above the format's maximum that rounding
                                          alone would not have brought them there. Of all elements, in one read
    line_sums(x, scale, cast, largest)    x [B, R, C]  ->  rows [len(ROW), B·R], columns [len(LINE), B·C], FP64:
                                          `LINE` (and `COUNTS`) summed over each row, and over each column
    measure(scale, tensors, cast, …)      both, as one vector: `SUMS`, then for rows and for columns Σ line / signal of
                                          the lines that are not all zero, in the order of `LINE`

**What is sampled.** A mean over a million elements is a mean over all of them but for a thousandth; a maximum is not,
nor a count of what is rare. So the amax is that of all elements, likewise saturation under a scale of the whole tensor
(scales of rows, groups and blocks are made of the very elements that they scale, which cannot saturate). The rest is
measured on whole rows, `SAMPLE` elements in all, so that rows, groups and columns are there; under scales of blocks, on
whole rows of blocks, one at least. An alternative with one scale has that of the whole tensor.

Rows are taken at an odd distance, from the middle of the first stretch: sequences and heads are as long as powers of
two, and rows at such a distance would be the first token of every sequence, or none. Where there are fewer rows than
that distance, one of each matrix is taken, and matrices at a distance.

On a GPU, eager operators would be hundreds of launches for each tensor; `measure_casts.py` has two kernels instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8compile.formats import Granularity, ceil_div, parse_granularity
from fp8compile.kernels.casts.loss_sums import ALTERNATIVES, LINE, ROW, SATURATED, SUMS, Lines
from fp8compile.kernels.reference import markers

SAMPLE = 1 << 20  # elements that are measured of the tensors that share a scale


class Kernels(NamedTuple):
    """The two functions that read tensors."""

    extremes: Callable[[Sequence[Tensor], Tensor | None, str], tuple[Tensor, Tensor]]
    line_sums: Callable[[Tensor, Tensor, str, Tensor], Lines]


# ---- in plain torch -------------------------------------------------------------------------------------------------


def extremes(tensors: Sequence[Tensor], scale: Tensor | None, format: str) -> tuple[Tensor, Tensor]:
    """Return (amax of all elements, FP32 []; how many saturate under a `scale` [] of all, int64 []). nan gives nan."""
    largest = torch.stack([torch.linalg.vector_norm(x, torch.inf).float() for x in tensors]).amax()
    if scale is None:
        return largest, torch.zeros((), dtype=torch.int64, device=largest.device)
    return largest, torch.stack([_above(x.float(), scale, format).sum() for x in tensors]).sum()


def _above(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Return where rounding alone would not have brought `x` (FP32) to the format's maximum; `scale` broadcasts."""
    return x.abs() > scale * SATURATED[format]


def line_sums(x: Tensor, scale: Tensor, cast: str, largest: Tensor) -> Lines:
    """Return sums over rows and columns of x [B, R, C], under `scale` [B or 1, …] and under each alternative.

    largest: amax of the tensor that x is a sample of, of which alternatives with one scale are made.
    """
    exact = x.float()
    format, granularity = cast.split(" ")
    data = markers.quantize(exact, scale, format, granularity)
    spread = markers.expand_scale(scale, parse_granularity(granularity), exact.shape)
    noises = [exact - data.float() * spread, *(_lost(exact, alternative, largest) for alternative in ALTERNATIVES)]
    counts = [exact != 0, (exact != 0) & (data.float() == 0), _above(exact, spread, format)]
    line = [value.square() for value in (*noises, exact)]
    rows, columns = (
        torch.stack([value.sum(dim, dtype=torch.float64).flatten() for value in values])
        for dim, values in ((-1, [*line, *counts]), (-2, line))
    )
    return rows, columns


def _lost(exact: Tensor, cast: str, largest: Tensor) -> Tensor:
    """Return x − x̂ of a cast with current scales."""
    format, granularity = cast.split(" ")
    scale = markers.scale(largest if granularity == "tensor" else markers.amax(exact, granularity), format)
    data = markers.quantize(exact, scale, format, granularity)
    return exact - markers.dequantize(data, scale, granularity, torch.float32)


PLAIN = Kernels(extremes, line_sums)


def kernels_for(x: Tensor) -> Kernels:
    """Return the kernels for a tensor: Triton's on a GPU, else plain torch."""
    if not x.is_cuda:
        return PLAIN
    from fp8compile.kernels.casts import measure_casts  # Triton is imported where there is a GPU

    return Kernels(measure_casts.extremes, measure_casts.line_sums)


# ---- samples --------------------------------------------------------------------------------------------------------


def sample(x: Tensor, scale: Tensor, granularity: Granularity, every: int) -> tuple[Tensor, Tensor]:
    """Return one in `every` rows of x [..., R, C] as [B, R', C], and their scales as [B, …]; one scale as [1, 1, 1]."""
    height = granularity.size if granularity.kind == "block" else 1
    one_scale = granularity.kind == "tensor"
    if not one_scale:
        scale = scale.narrow(-2, 0, ceil_div(x.shape[-2], height))  # without those of padding
    for dim in range(x.dim() - 2, -1, -1):
        distance = min(every | 1, max(x.shape[dim] // height, 1)) if every > 1 else 1
        if distance > 1:
            x = _spread(x, dim, height, distance)
            scale = scale if one_scale else _spread(scale, dim, 1, distance)
        every, height = ceil_div(every, distance), 1
    return x.reshape(-1, *x.shape[-2:]), scale.reshape(-1, *((1, 1) if one_scale else scale.shape[-2:]))


def _spread(x: Tensor, dim: int, height: int, distance: int) -> Tensor:
    """Return stretches of `height` along `dim`, one in `distance`; a view if they are of one."""
    stretches = x.narrow(dim, 0, x.shape[dim] // height * height).unflatten(dim, (-1, height))
    return stretches[(slice(None),) * dim + (slice(distance // 2, None, distance),)].flatten(dim, dim + 1)


# ---- both together --------------------------------------------------------------------------------------------------


def measure(
    scale: Tensor | None, tensors: Sequence[Tensor], cast: str, transpose: bool, kernels: Kernels | None = None
) -> Tensor:
    """Return `SUMS`, then `LINE` over rows and over columns, of one execution, FP64 [n]; zeros, and one skipped, if an
    element is not finite.

    `tensors` share the scale; None: the current one of all of them. `transpose`: rows and groups lie along their first
    dimension.
    """
    format, granularity = cast.split(" ")
    how = parse_granularity(granularity)
    some = [x.transpose(-1, -2) if transpose else x for x in tensors if x.numel()]
    if not some:
        none = tensors[0].new_zeros((), dtype=torch.float64)
        return _vector(none, none, 0, none.new_zeros(len(ROW) + 2 * len(LINE)))
    read = kernels or kernels_for(some[0])
    largest, saturated = read.extremes(some, scale if how.kind == "tensor" else None, format)
    scale = markers.scale(largest, format) if scale is None else scale
    elements = sum(x.numel() for x in some)
    samples = [sample(x, scale, how, ceil_div(elements, SAMPLE)) for x in some]
    parts = [_totals(*read.line_sums(x, of, cast, largest)) for x, of in samples]
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    if how.kind != "tensor":
        saturated, elements = total[ROW.index("above")], sum(x.numel() for x, _ in samples)
    return _vector(largest, saturated, elements, total)


def _totals(rows: Tensor, columns: Tensor) -> Tensor:
    """Return `ROW` over all rows, and Σ line / signal over the rows, then the columns, that are not all zero."""
    signal = LINE.index("signal")
    evenly = [(lines[: len(LINE)] / lines[signal]).nansum(-1) for lines in (rows, columns)]
    return torch.cat([rows.sum(-1), *evenly])


def _vector(largest: Tensor, saturated: Tensor, elements: int, total: Tensor) -> Tensor:
    """Return the vector of `measure`; by few operators, for each is a launch."""
    head = total.new_zeros(len(SUMS) - len(ROW))
    for name, value in (("steps", 1.0), ("elements", elements)):
        head[SUMS.index(name)].fill_(value)
    for name, value in (("amax", largest), ("saturated", saturated)):
        head[SUMS.index(name)].copy_(value)
    sums = torch.cat([head, total])
    skipped = torch.zeros_like(sums)
    skipped[SUMS.index("skipped")].fill_(1.0)
    return torch.where(largest < torch.inf, sums, skipped)  # nan is not less
