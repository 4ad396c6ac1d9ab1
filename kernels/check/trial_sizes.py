"""Symbolic sizes for trying a kernel out: numbers that fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8compile.formats import round_up
from fp8compile.kernels.codegen.spec.region import Part, Region, Size, number_of


def pick_sizes(region: Region, about: int = 4096) -> dict[str, int]:
    """Return values for the symbolic sizes that fit together: loops over rows make up the rows, strides hold what they
    step over."""
    names: dict[str, int] = {}
    for rows in {part.rows for part in region.parts if isinstance(part.rows, str)}:
        parts = [part for part in region.parts if part.rows == rows]
        inner = [size for part in parts for loops in _row_loops(part) for size in loops if isinstance(size, int)]
        names[rows] = round_up(about, math.prod({16, *(part.row_divisor for part in parts), *inner}))
    for part in region.parts:
        for loops in _row_loops(part):
            _fill(loops, number_of(part.rows, names), names)
    return {name: names.get(name, about) for name in region.sizes}


def _row_loops(part: Part) -> Iterator[list[Size]]:
    for i in part.inputs:
        yield [size for size, _ in i.rows]


def _fill(loops: list[Size], rows: int, names: dict[str, int]) -> None:
    """Name what is unknown of `loops`, whose product is `rows`: the first makes up for the others, which are 1."""
    unknown = [size for size in loops if isinstance(size, str) and size not in names]
    for name in unknown[1:]:
        names[name] = 1
    if unknown:
        known = 1
        for size in loops:
            known *= number_of(size, names) if size != unknown[0] else 1
        names[unknown[0]] = rows // known
