"""The tiles of one part: rows and columns that they cover, programs that walk over them, and limits of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.codegen.schedule import packed_transpose
from fp8compile.kernels.codegen.schedule.tiling import Tiling, extent
from fp8compile.kernels.codegen.source.statements import Expression, Name, expr
from fp8compile.kernels.codegen.spec.region import ELEMENT, Extent, Input, Part, Size, Store

INT32_MAX = 2**31 - 1


def size_of(size: Size) -> Expression:
    """Return a size as source: a number, or the argument that has it."""
    return Name(size) if isinstance(size, str) else expr(str(size))


@dataclass(frozen=True)
class TileLayout:
    """A part and its tiling, and what follows from both."""

    part: Part
    tiling: Tiling

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.tiling.block_rows, self.tiling.block_cols

    @cached_property
    def covered(self) -> tuple[Size, int]:
        """Rows and columns that the tiles cover, with the zeros that stores append."""
        return extent(self.part)

    @cached_property
    def row_blocks(self) -> int | None:
        """The number of tiles below each other; None if it is known with the call only."""
        rows = self.covered[0]
        return max(1, ceil_div(rows, self.tiling.block_rows)) if isinstance(rows, int) else None

    @cached_property
    def loops(self) -> bool:
        """True if a program walks down the rows, from tile to tile."""
        return self.row_blocks is None or self.row_blocks > self.tiling.row_programs

    @cached_property
    def walks_in_runs(self) -> bool:
        """True if the tiles of a program lie next to each other, as those should that are stored transposed: each has
        a few bytes of many lines of memory, which are written once if the rest of the line soon follows."""
        return self.loops and any(store.transposed for store in self.part.stores)

    @cached_property
    def band_rows(self) -> int:
        """The number of rows of a band, if a program walks down one of several; else 0."""
        if not self.loops or self.part.bands == 1:
            return 0
        assert isinstance(self.part.rows, int), "bands are of rows that are known"
        return self.part.rows // self.part.bands

    @cached_property
    def steps(self) -> tuple[int, int]:
        """Rows and columns from one of a tensor to the next."""
        return packed_transpose.STEP if self.tiling.packed_transpose else 1, 1

    def shape(self, extent: Extent) -> list[int]:
        """Return the shape that a value of this extent has in a tile."""
        return [self.block[d] // max(extent[d], self.steps[d]) if extent[d] else 1 for d in (0, 1)]

    def limit(self, dim: int, step: int, multiple: int) -> Expression | None:
        """Return how many rows (`dim` 0) or columns (1) there are, in groups of `step`, with zeros appended up to
        `multiple`; None if all that the tiles cover are there."""
        total: Size = (self.part.rows, self.part.cols)[dim]
        if isinstance(total, str):
            multiples = (self.block[dim], *(s.row_multiple for s in self.part.stores))
            if all(self.part.row_divisor % n == 0 for n in multiples):
                return None
            padded = expr(f"(tl.cdiv({{}}, {multiple}) * {multiple})", Name(total)) if multiple > 1 else Name(total)
            return padded if step == 1 else expr("tl.cdiv({}, {})", padded, step)
        blocks = self.row_blocks if dim == 0 else self.tiling.col_blocks
        limit = ceil_div(round_up(total, multiple), step)
        complete = blocks is not None and limit * step == blocks * self.block[dim]
        return None if complete else expr(str(limit))

    def rows_alike(self, spec: Input) -> int:
        """Return how many rows, all of a program's band or all of a tile, read the same of an input that varies by
        rows; 0 if not even those of a tile do."""
        if spec.extent[0] != 1 or self.limit(0, 1, 1):
            return 0
        sizes = (self.band_rows, self.tiling.block_rows)
        return next((rows for rows in sizes if rows > 1 and spec.repeats % rows == 0), 0)

    def loaded_once_for(self, i: int) -> int:
        """Return for how many rows value `i` is loaded once: those of a band, or of a tile; 0 if it is for each."""
        value = self.part.values[i]
        return self.rows_alike(self.part.inputs[value.params[0]]) if value.op == "load" else 0

    def is_interleaved(self, i: int) -> bool:
        """Return True if value `i` is computed for every fourth row at a time."""
        by_rows = self.tiling.packed_transpose and self.part.extents[i][0] == 1
        return by_rows and not self.loaded_once_for(i)

    @cached_property
    def holds_wide_rows(self) -> bool:
        """True if a program holds so much of whole rows that registers are what it runs out of."""
        held = self.tiling.block_cols * (self.tiling.col_blocks if self.tiling.held else 1)
        wide = held * sum(i.extent == ELEMENT for i in self.part.inputs) > 16384
        return any(self.part.levels) and wide and not self.tiling.sweeps

    def is_wide_store(self, store: Store, outer: Size) -> bool:
        """Return True if an offset may pass what 32 bits hold; `outer`: how many of what is `lead` apart there are."""
        if isinstance(store.lead, str) or isinstance(store.offset, str) or isinstance(outer, str):
            return True
        return outer * store.lead + store.offset > INT32_MAX
