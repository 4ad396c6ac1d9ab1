"""The cast of groups of tokens for grad_weight of a mixture's experts, in plain torch.

    x [T, C]      tokens in E groups that end at offs [E]; behind the last one anything
    data [C, P]   their codes, tokens side by side: group e ends at ends[e], begins at a multiple of 16, and is filled
                  up with zeros to one; 16 zeros of a group that has no tokens
    scale [E, C, 1]   of each group's column, `markers.scale` of its amax; or of all columns of a group, the same

P suffices whatever the groups: a group takes a piece of 16 tokens more than it fills, at most. Matmul units read what
they contract in such pieces, and torch's kernel takes no empty group (`kernels/matmul/scaled_mm.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import ALIGNMENT, FORMATS, round_up
from fp8compile.kernels.reference import markers


def padded_tokens(tokens: Any, groups: Any) -> Any:
    """Return P: how many tokens suffice for so many groups of so many tokens, for ints and symbolic ints."""
    return (tokens // ALIGNMENT + groups) * ALIGNMENT


def padded_ends(offs: Tensor) -> Tensor:
    """Return where groups that end at `offs` [E] end when each has a multiple of 16 tokens, and 16 at least."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    pieces = torch.div(sizes + ALIGNMENT - 1, ALIGNMENT, rounding_mode="floor").clamp_min(1)
    return (pieces * ALIGNMENT).cumsum(0).to(offs.dtype)


def grouped_cast(
    x: Tensor,
    offs: Tensor,
    format: str,
    power_of_two: bool = False,
    row_multiple: int = 1,
    amax: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (data, scale, ends) of x [T, C], whose groups end at offs [E]; zeros behind the last group too.

    row_multiple: zeros are appended until C is a multiple of it. A group of which a column is not finite has a scale
    that is not, and zeros for padding even so.
    amax [T, 1]: the largest magnitude of each token. Where it is given, a group has one scale for all columns, that of
    the largest of its tokens' amaxes.
    index [T]: the tokens are these rows of x; zeros where it is negative.
    """
    if index is not None:
        x = torch.where(index[:, None] < 0, 0, x[index.clamp(0, x.shape[0] - 1)])  # nobody reads behind the last group
    tokens, width = x.shape[0], round_up(x.shape[1], row_multiple)
    data = x.new_zeros(width, padded_tokens(tokens, offs.shape[0]), dtype=FORMATS[format].dtype)
    scale = x.new_ones(offs.shape[0], width, 1, dtype=torch.float32)
    ends = padded_ends(offs)
    groups = zip(pairwise([0, *offs.tolist()]), [0, *ends.tolist()], scale, strict=False)
    for (start, end), place, own in groups:
        if end > start:
            part = x[start:end]
            largest = markers.amax(part, "row", True, row_multiple) if amax is None else amax[start:end].amax()
            own.copy_(markers.scale(largest, format, power_of_two))
            data[:, place : place + end - start] = markers.quantize(part, own, format, "row", True, row_multiple)
    return data, scale, ends
