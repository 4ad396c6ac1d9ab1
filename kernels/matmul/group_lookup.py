"""Groups of rows, looked up by a kernel: only the device knows where they end."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = 16  # lanes; fewer are no faster


def lanes(groups: int) -> int:
    """Return the power of two that holds so many groups: GROUPS of the functions below."""
    return max(LEAST, 1 << (groups - 1).bit_length())


@triton.jit
def look_up(offs, groups, GROUPS: tl.constexpr):  # noqa: N803
    """(number, first row, end) of every group; those behind the last have no rows."""
    group = tl.arange(0, GROUPS)
    end = tl.load(offs + group, mask=group < groups, other=0)
    start = tl.load(offs + group - 1, mask=(group > 0) & (group < groups), other=0)
    return group, start, end


@triton.jit
def of(group, mine, value):
    """Return the entry of `value` that is that of group `mine`."""
    return tl.sum(tl.where(group == mine, value, 0), 0)
