"""Tiles in quarters (`kernels/quarters.py`): a function for every fourth row, and what is stored of all four."""

from __future__ import annotations

import re

from fp8compile.kernels.emit_tile import INT32_MAX
from fp8compile.kernels.emit_values import Values
from fp8compile.kernels.quarters import STEP
from fp8compile.kernels.spec import Store, Value

NAMES = re.compile(r"\b(?:[xnv]\d+|inverse\d+|rows\w*|cols\w*|row_block|col_block)\b")


class Quarters(Values):
    """Writes the values of a part into a function of every fourth row, if its tiling says so, and their stores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quarter: list[str] = []
        self.results: list[int] = []  # the values that the function returns

    def _lines_of(self, i: int) -> list[str]:
        return self.quarter if self.tiling.quarters and self.part.extents[i][0] else super()._lines_of(i)

    def _quantize(self, i: int, value: Value) -> str:
        """In quarters, what is to be cast: codes of four rows are made together."""
        in_quarters = self.tiling.quarters and self.part.extents[i][0]
        return self._divided(i, value) if in_quarters else super()._quantize(i, value)

    def _rows(self, step: int, numbers: str) -> tuple[list[str], str]:
        if not self.tiling.quarters:
            return super()._rows(step, numbers)
        return self.quarter, numbers if step > 1 else f"{self._rows_of_first()} + row"

    def _rows_of_first(self) -> str:
        """The rows of the first quarter."""
        block = self.tiling.block_rows
        return f"row_block * {block} + {STEP} * tl.arange(0, {block // STEP})[:, None]"

    def _finish_quarters(self, name: str) -> str:
        """The function of every fourth row. It is called four times before anything is stored: loads come first."""
        returned = []
        for store in self.part.stores:
            extent = self.part.extents[store.value]
            if extent[0] and store.value not in self.results:
                self.results.append(store.value)
                text, exists = f"v{store.value}", self._mask(extent)
                if exists and any(s.row_multiple * s.col_multiple > 1 for s in self._stores_of(store.value)):
                    text = f"tl.where({exists}, {text}, 0.0)"
                returned.append(text)
        lines = [*self.quarter, f"return {', '.join(returned)}{',' if len(returned) == 1 else ''}"]
        defined = {line.split(" = ")[0] for line in self.quarter}
        used = dict.fromkeys(found for line in lines for found in NAMES.findall(line))
        arguments = ", ".join(sorted(set(used) - defined))
        self.body += [f"q{row} = {name}({row}, {arguments})" for row in range(STEP)]
        self.body.append(f"q = ({', '.join(f'q{row}' for row in range(STEP))})")
        head = f"@triton.jit\ndef {name}(row, {arguments}):"
        says = f'"""Rows `row`, `row` + {STEP}, `row` + {2 * STEP}, … of a tile."""'
        return "\n".join([head, *(f"    {line}" for line in (says, *lines))])

    def _stores_of(self, value: int) -> list[Store]:
        return [s for s in self.part.stores if s.value == value]

    def _store_quarters(self, store: Store) -> None:
        """Store a result of all four: as it is, or in words."""
        if store.transposed:
            self._store_words(store)
            return
        value, extent = self.part.values[store.value], self.part.extents[store.value]
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
        extent = self.part.extents[store.value]
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
