"""Packed transposes: tiles of which every fourth row is a tensor of its own, and the parts that may have such tiles.

A transposed payload has the codes of four rows next to each other. Where one thread has all four, they cross shared
memory as one word; code by code that is four times as many instructions, and the slowest ones of a kernel that stores
several payloads.

Amaxes of groups of rows can be joined over the four tensors; no such tiles are chosen, because they took longer. What a
program accumulates over its tiles (the tensor's amax, column sums) is joined in the same way.
"""

from __future__ import annotations

from fp8compile.formats import round_up
from fp8compile.kernels.codegen.spec.region import ELEMENT, ROW_REDUCTIONS, Part, Store

STEP = 4  # codes of a word
JOINED = ("col_group_amax", "block_amax")  # found in each of the four tensors, and joined
NEEDS_WHOLE_TILE = ("col_amax", *ROW_REDUCTIONS)
ACCUMULATED = ("all_amax", "col_sum")  # the same, over all tiles of a program


def possible(part: Part) -> bool:
    """Return True if all that `part` stores transposed are codes, in words that are whole and aligned, and no operation
    joins rows."""
    values, extents = part.values, part.extents
    coded = {i for i, v in enumerate(values) if v.op == "quantize"}
    transposed = [s for s in part.stores if s.transposed and part.stored_extent(s) == ELEMENT]
    return (
        bool(transposed)
        and not any(v.op in NEEDS_WHOLE_TILE or coded & set(v.args) for v in values)
        and not any(v.op in JOINED and v.params[0] % STEP for v in values)
        and all(_varies_by_element(part, v.args[0]) for v in values if v.op in ACCUMULATED)
        and part.bands == 1
        and not any(1 < rows < STEP for rows, _ in extents)
        and all(s.value in coded and _in_words(part, s) for s in transposed)
        and all(part.stored_extent(s) == extents[s.value] for s in part.stores if values[s.value].op not in ACCUMULATED)
        and not any(s.transposed and extents[s.value][0] == 1 for s in part.stores if s not in transposed)
    )


def _varies_by_element(part: Part, i: int) -> bool:
    """Return True if each of four rows has its own elements of value `i`."""
    value = part.values[i]
    return part.extents[i] == ELEMENT and (value.op != "load" or part.inputs[value.params[0]].repeats == 1)


def _in_words(part: Part, store: Store) -> bool:
    """Return True if each column of this store is made of whole words that begin at multiples of four."""
    if isinstance(part.rows, str):
        rows = store.row_multiple % STEP == 0 or part.row_divisor % STEP == 0
    else:
        rows = round_up(part.rows, store.row_multiple) % STEP == 0
    # a name is that of the rows, rounded up; of an offset, of a multiple of them
    lead = rows if isinstance(store.lead, str) else store.lead % STEP == 0
    offset = lead if isinstance(store.offset, str) else store.offset % STEP == 0
    return rows and lead and offset
