"""Tiles in quarters (`kernels/codegen/packed_transpose.py`): functions for every fourth row, and what is stored of all
four.

The phases (`kernels/codegen/emit_phases.py`): reduce_quarter0, … for the amaxes of groups of rows that others need; and
`quarter`, which returns what is stored.
"""

from __future__ import annotations

import re

from fp8compile.kernels.codegen.emit_phases import Phases
from fp8compile.kernels.codegen.emit_tile import INT32_MAX
from fp8compile.kernels.codegen.emit_values import max_of_groups
from fp8compile.kernels.codegen.packed_transpose import JOINED, STEP
from fp8compile.kernels.codegen.spec import ELEMENT, Store, Value


class Quarters(Phases):
    """Writes the values of a part into functions of every fourth row, if its tiling says so, and their stores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results: list[int] = []  # the values that are stored
        if self.tiling.quarters:
            self.tensors, self.number, self.own = STEP, "row", re.compile("rows?")

    def _lines_of(self, i: int) -> list[str]:
        in_quarters = self.tiling.quarters and self.part.extents[i][0] == 1 and not self._loaded_once_for(i)
        return self.tile if in_quarters else super()._lines_of(i)

    def _quantize(self, i: int, value: Value) -> str:
        """In quarters, what is to be cast: codes of four rows are made together."""
        in_quarters = self.tiling.quarters and self.part.extents[i][0] == 1
        return self._divided(i, value) if in_quarters else super()._quantize(i, value)

    def _rows(self, step: int, numbers: str) -> tuple[list[str], str]:
        if not self.tiling.quarters:
            return super()._rows(step, numbers)
        return (self.body, numbers) if step > 1 else (self.tile, f"{self._rows_of_first()} + row")

    def _rows_of_first(self) -> str:
        """The rows of the first quarter."""
        block = self.tiling.block_rows
        return f"row_block * {block} + {STEP} * tl.arange(0, {block // STEP})[:, None]"

    def _named(self, n: int, last: int) -> tuple[str, str]:
        return ("quarter", "q") if n == last else (f"reduce_quarter{n}", f"r{n}_")

    def _join_amaxes(self, needed: set[int]) -> None:
        """The phases that find the amaxes of groups of rows among the values `needed`."""
        values = self.part.values
        levels: list[int] = []
        for value in values:
            levels.append(max((levels[a] for a in value.args), default=0) + (value.op in JOINED))
        for level in range(1, max(levels, default=0) + 1):
            amaxes = [i for i in sorted(needed) if values[i].op in JOINED and levels[i] == level]
            self._use("magnitude")
            for i in amaxes:
                self._join(i, f"magnitude({self._full(values[i].args[0], '0.0')})", "tl.maximum({}, {})")
            self._end_phase()
            for i in amaxes:
                self.body.append(f"v{i} = {self._amax_of_groups(values[i], f'acc{i}')}.to(tl.float32, bitcast=True)")
                self.done.add(i)

    def _amax_of_groups(self, value: Value, joined: str) -> str:
        """The amaxes of groups of rows. Row n of what is `joined` is the greatest of rows 4 n to 4 n + 3."""
        size = value.params[0]
        rows, cols = self._shape(ELEMENT)
        if value.op == "block_amax":
            joined = max_of_groups(joined, rows, cols, 1, size)
            cols //= size
        return max_of_groups(joined, rows, cols, 0, size // STEP)

    def _finish_quarters(self) -> None:
        """The last phase. It is called four times before anything is stored: loads come first."""
        returned = []
        for store in self.part.stores:
            extent = self.part.extents[store.value]
            if extent[0] == 1 and store.value not in self.results:
                self.results.append(store.value)
                text, exists = self._value(store.value), self._mask(extent)
                if exists and any(s.row_multiple * s.col_multiple > 1 for s in self._stores_of(store.value)):
                    text = f"tl.where({exists}, {text}, 0.0)"
                returned.append(text)
        self._end_phase()
        self.phases[-1].returned = returned
        self.phases[-1].says = f"Rows `row`, `row` + {STEP}, `row` + {2 * STEP}, … of a tile."
        self.body.append(f"q = ({', '.join(f'q{row}' for row in range(STEP))})")

    def _stores_of(self, value: int) -> list[Store]:
        return [s for s in self.part.stores if s.value == value]

    def _store_quarters(self, store: Store) -> None:
        """Store a result of all four: as it is, or in words."""
        if store.transposed:
            self._store_words(store)
            return
        value, extent = self.part.values[store.value], self.part.stored_extent(store)
        dtype = self.region.buffers[store.buffer].dtype
        text = f"q[row][{self.results.index(store.value)}]"
        if value.op == "quantize":
            self._use(f"to_{value.params[0]}")
            text = f"to_{value.params[0]}({text})"
        elif not dtype.startswith(("float32", "int", "bool")):
            text = f"{text}.to(tl.{dtype})"
        rows = self._first_rows()
        if self._is_wide_store(store, self.rows_covered):
            rows += ".to(tl.int64)"
        terms = [str(store.offset)] if store.offset else []
        terms.append(rows if store.lead == 1 else f"{rows} * {store.lead}")
        terms += [self._axis(1, extent[1])] if extent[1] else []
        mask = self._mask_of_all(store)
        if not extent[1] and self.tiling.col_blocks > 1:
            mask = " & ".join(filter(None, [mask, "(col_block == 0)"]))
        line = (
            f"tl.store({self._pointer(store, dtype)} + {' + '.join(terms)}, {text}{f', mask={mask}' if mask else ''})"
        )
        self.body += [f"for row in tl.static_range({STEP}):", f"    {line}"]

    def _first_rows(self) -> str:
        """The rows of a quarter, outside of its function."""
        line = f"rows = {self._rows_of_first()}"
        if line not in self.body:
            self.body.append(line)
        return "(rows + row)"

    def _mask_of_all(self, store: Store) -> str:
        """The mask of a store as it is."""
        extent = self.part.stored_extent(store)
        limits = [
            self._limit(d, extent[d], (store.row_multiple, store.col_multiple)[d]) if extent[d] else "" for d in (0, 1)
        ]
        terms = [f"({self._first_rows()} < {limits[0]})"] if limits[0] else []
        terms += [f"({self._axis(1, extent[1])} < {limits[1]})"] if limits[1] else []
        return " & ".join(terms)

    def _store_words(self, store: Store) -> None:
        """Store the codes of four rows as one word, transposed."""
        helper = f"words_{self.part.values[store.value].params[0]}"
        self._use(helper)
        words, vector = self.tiling.block_rows // STEP, "words_t"
        line = f"{vector} = row_block * {words} + tl.arange(0, {words})[None, :]"
        if line not in self.body:
            self.body.append(line)
        pointer = f"y{store.buffer}_words"
        cast = f"{pointer} = y{store.buffer}.to(tl.pointer_type(tl.int32), bitcast=True)"
        if cast not in self.before:
            self.before.append(cast)
        cols = self._axis(1, 1, across=True)
        wide = f"{cols}.to(tl.int64)" if self._is_wide_store(store, self.cols_covered) else cols
        lead = store.lead // STEP if isinstance(store.lead, int) else f"({store.lead} // {STEP})"
        offset = [str(int(store.offset) // STEP)] if store.offset else []
        limits = [self._limit(d, 1, (store.row_multiple, store.col_multiple)[d]) for d in (0, 1)]
        masks = [f"({vector} * {STEP} < {limits[0]})"] if limits[0] else []
        masks += [f"({cols} < {limits[1]})"] if limits[1] else []
        slot = self.results.index(store.value)
        text = f"tl.trans({helper}({', '.join(f'q[{row}][{slot}]' for row in range(STEP))}))"
        index = " + ".join([*offset, f"{wide} * {lead}", vector])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.body.append(f"tl.store({pointer} + {index}, {text}{mask})")

    def _is_wide_store(self, store: Store, outer: int | str) -> bool:
        """Whether an offset may pass what 32 bits hold; `outer`: how many of what is `lead` apart there are."""
        if isinstance(store.lead, str) or isinstance(store.offset, str) or isinstance(outer, str):
            return True
        return outer * store.lead + store.offset > INT32_MAX

    def _pointer(self, store: Store, dtype: str) -> str:
        name = f"y{store.buffer}"
        if not dtype.startswith("float8"):
            return name
        line = f"{name}_bytes = {name}.to(tl.pointer_type(tl.uint8), bitcast=True)"
        if line not in self.before:
            self.before.append(line)
        return f"{name}_bytes"
