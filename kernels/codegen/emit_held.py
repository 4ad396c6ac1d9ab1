"""Rows held in several tiles: a program loads all tiles of its rows, and has them until it stores.

A tile is a power of two wide. A row of 14336 takes 16384 columns in one tile, and none too many in seven of 2048. The
phases (`kernels/codegen/emit_phases.py`): load_tile; reduce_tile1, … for each row reduction that another one needs;
store_tile, with the number after theirs.
"""

from __future__ import annotations

import re

from fp8compile.kernels.codegen.emit_packed_transpose import Quarters
from fp8compile.kernels.codegen.spec import ROW_REDUCTIONS


class Held(Quarters):
    """Writes what is done with the tiles of rows that are held, if the tiling says so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiling.held:
            self.tensors, self.number = self.tiling.col_blocks, "col_block"
            self.own = re.compile(r"cols\w*|col_block")

    def _named(self, n: int, last: int) -> tuple[str, str]:
        if not self.tiling.held:
            return super()._named(n, last)
        does = "load" if n == 0 else "reduce" if n < last else "store"
        return f"{does}_tile{n or ''}", f"p{n}_"

    def _hold(self, needed: set[int]) -> None:
        """The phases that load and reduce the values `needed` for what is stored."""
        values = self.part.values
        for i in sorted(needed):
            if values[i].op == "load" and self.part.extents[i][1]:
                self._value(i)
        self._end_phase()
        for level in range(1, max(self.levels, default=0) + 1):
            totals = {}
            for i in sorted(needed):
                if values[i].op in ROW_REDUCTIONS and self.levels[i] == level:
                    text, _, join, totals[i] = self._reduction(values[i])
                    self._join(i, text, join)
            self._end_phase()
            for i, total in totals.items():
                self.body.append(f"v{i} = {total.format(f'acc{i}')}")
                self.done.add(i)
