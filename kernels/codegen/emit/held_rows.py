"""Rows held in several tiles: a program loads all tiles of its rows, and has them until it stores.

A tile is a power of two wide. A row of 14336 takes 16384 columns in one tile, and none too many in seven of 2048. The
phases (`kernels/codegen/emit/phases.py`): load_tile; reduce_tile1, … for each row reduction that another one needs;
store_tile, with the number after theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8compile.kernels.codegen.emit.indices import COL_BLOCK, Indices
from fp8compile.kernels.codegen.emit.phases import Phases, Tensors
from fp8compile.kernels.codegen.emit.values import Values
from fp8compile.kernels.codegen.source.statements import Assign, Name, expr
from fp8compile.kernels.codegen.spec.region import ROW_REDUCTIONS


def tiles_of_rows(count: int, indices: Indices) -> Tensors:
    """Return the tensors of rows that are held in `count` tiles."""

    def named(n: int, last: int) -> tuple[str, str]:
        does = "load" if n == 0 else "reduce" if n < last else "store"
        return f"{does}_tile{n or ''}", f"p{n}_"

    return Tensors(count, COL_BLOCK, lambda name: name == COL_BLOCK or indices.dims.get(name) == 1, named)


def hold_rows(needed: set[int], values: Values, phases: Phases, store_before: Callable[[int], None]) -> None:
    """Write the phases that load and reduce the values `needed` for what is stored.

    store_before: stores what is known before the reductions of a level, in the phase that finds these.
    """
    part, draft = values.part, values.draft
    for i in sorted(needed):
        if part.values[i].op == "load" and part.extents[i][1]:
            values.value(i)
    phases.end()
    for level in range(1, max(part.levels, default=0) + 1):
        totals: dict[int, str] = {}
        for i in sorted(needed):
            if part.values[i].op in ROW_REDUCTIONS and part.levels[i] == level:
                reduction, element = values.reduced(part.values[i])
                phases.join(i, element, reduction.join)
                totals[i] = reduction.total
        store_before(level)
        phases.end()
        for i, total in totals.items():
            values.define(i, Assign(Name(f"v{i}"), expr(total, Name(f"acc{i}"))), draft.body)
