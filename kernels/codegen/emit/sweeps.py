"""Rows in sweeps: a program reads the tiles of its rows once for each reduction that another one needs, and once to
store."""

from __future__ import annotations

from fp8compile.kernels.codegen.emit.indices import COL_BLOCK
from fp8compile.kernels.codegen.emit.values import Values
from fp8compile.kernels.codegen.source.statements import Assign, For, Name, Statement, expr
from fp8compile.kernels.codegen.spec.region import ELEMENT, ROW_REDUCTIONS


def reduce_rows(values: Values) -> None:
    """Write a sweep for each level of reductions."""
    for level in range(1, max(values.part.levels, default=0) + 1):
        _reduce_level(values, level)


def _reduce_level(values: Values, level: int) -> None:
    """Write a sweep that reads the tiles of a row once for all reductions of this level."""
    part, draft = values.part, values.draft
    first: list[Statement] = []
    last: dict[int, Assign] = {}
    for i, value in enumerate(part.values):
        if value.op not in ROW_REDUCTIONS or part.levels[i] != level:
            continue
        reduction, element = values.reduced(value)
        total = Name(f"acc{i}")
        first.append(Assign(total, expr(reduction.zero.format(shape=values.layout.shape(ELEMENT)))))
        draft.tile.append(Assign(total, expr(reduction.join, total, element)))
        last[i] = Assign(Name(f"v{i}"), expr(reduction.total, total))
    draft.body += first
    values.done |= last.keys()
    end_sweep(values)
    draft.body += last.values()


def end_sweep(values: Values) -> None:
    """Make a loop of what was written for each tile of a row."""
    draft, indices = values.draft, values.indices
    if not draft.tile:
        return
    span = expr(f"range({values.layout.tiling.col_blocks})")
    draft.body.append(For(COL_BLOCK, span, tuple(draft.tile)))
    draft.tile.clear()
    values.done -= values.in_tile
    values.in_tile.clear()
    indices.written = {name for name in indices.written if indices.dims[name] != 1}
