"""Coverage: whether the stores of a region fill its buffers, so that nothing is read that no kernel wrote.

A store writes R × C elements, each `lead` after the one above it, from `offset` on. Stores fill a buffer if each lies
in it, no two overlap, and their elements add up to all there are. Padding counts as written: a store appends it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.codegen.schedule.tiling import Schedule, resolve
from fp8compile.kernels.codegen.spec.region import PARTIALS, Part, Region, Store, number_of


@dataclass(frozen=True)
class Block:
    """Rows × columns of a buffer whose rows are `lead` elements apart; its first element is at `offset`."""

    offset: int
    rows: int
    cols: int
    lead: int

    @property
    def end(self) -> int:
        """One more than its last element."""
        return self.offset + (self.rows - 1) * self.lead + self.cols if self.rows and self.cols else self.offset

    def overlaps(self, other: Block) -> bool:
        """Return whether an element may belong to both; blocks of different leads are taken for overlapping where their
        spans do."""
        if self.end <= other.offset or other.end <= self.offset:
            return False
        if self.lead != other.lead or self.lead < 1:
            return True
        (r, c), (s, d) = divmod(self.offset, self.lead), divmod(other.offset, self.lead)
        return r < s + other.rows and s < r + self.rows and c < d + other.cols and d < c + self.cols


def unwritten(region: Region, schedule: Schedule, sizes: Mapping[str, int]) -> str:
    """Return what is wrong with the first buffer that is not filled exactly once; "" if all are. `sizes`: the values of
    the symbolic ones."""
    for n, buffer in enumerate(region.buffers):
        stores = [(part, store) for part in region.parts for store in part.stores if store.buffer == n]
        if any(part.values[store.value].op in PARTIALS for part, store in stores):
            continue  # one result a program, each of which writes its own
        shape = [resolve(d, dict(sizes), schedule) for d in buffer.shape]
        count = 1
        for size in shape:
            count *= size
        why = _wrong([block_of(part, store, sizes) for part, store in stores], count)
        if why:
            return f"buffer {n} {shape}: {why}"
    return ""


def block_of(part: Part, store: Store, sizes: Mapping[str, int]) -> Block:
    """Return the elements of its buffer that `store` writes, with the zeros that it appends."""
    steps = part.stored_extent(store)
    lengths = (number_of(part.rows, sizes), store.row_multiple), (part.cols, store.col_multiple)
    rows, cols = (
        ceil_div(round_up(n, multiple), step) if step else 1 for (n, multiple), step in zip(lengths, steps, strict=True)
    )
    if store.transposed:
        rows, cols = cols, rows
    return Block(number_of(store.offset, sizes), rows, cols, number_of(store.lead, sizes))


def _wrong(blocks: list[Block], count: int) -> str:
    for block in blocks:
        if block.rows > 1 and block.cols > block.lead:
            return f"rows of {block.cols} elements lie {block.lead} apart"
        if block.end > count:
            return f"element {block.end - 1} of {count} is written"
    if any(a.overlaps(b) for a, b in itertools.combinations(blocks, 2)):
        return "two stores overlap"
    written = sum(block.rows * block.cols for block in blocks)
    return "" if written == count else f"{written} of {count} elements are written"
