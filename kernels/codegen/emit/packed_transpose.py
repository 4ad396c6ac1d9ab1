"""Tiles with packed transposes (`kernels/codegen/schedule/packed_transpose.py`): functions for every fourth row, and
what is stored of all four.

The phases (`kernels/codegen/emit/phases.py`): reduce_quarter0, … for the amaxes of groups of rows that others need; and
`quarter`, which returns what is stored.
"""

from __future__ import annotations

from fp8compile.kernels.codegen.emit.indices import COL_BLOCK, ROW, ROW_BLOCK, ROWS
from fp8compile.kernels.codegen.emit.phases import Phases, Tensors
from fp8compile.kernels.codegen.emit.values import Values, max_of_groups
from fp8compile.kernels.codegen.schedule.packed_transpose import ACCUMULATED, JOINED, STEP
from fp8compile.kernels.codegen.schedule.tile_layout import size_of
from fp8compile.kernels.codegen.source.statements import (
    Apply,
    Assign,
    Expression,
    For,
    Name,
    Write,
    all_of,
    expr,
    joined,
)
from fp8compile.kernels.codegen.spec.reductions import TO_FLOAT
from fp8compile.kernels.codegen.spec.region import ELEMENT, GROUP_REDUCTIONS, Size, Store, Value


def _named(n: int, last: int) -> tuple[str, str]:
    return ("quarter", "q") if n == last else (f"reduce_quarter{n}", f"r{n}_")


EVERY_FOURTH_ROW = Tensors(STEP, ROW, lambda name: name in (ROW, ROWS), _named)
QUARTERS = Name("q")  # the results of all four


class PackedTranspose:
    """Writes the phases of a part, and what it stores element by element or in groups of columns."""

    def __init__(self, values: Values, phases: Phases) -> None:
        self.values, self.phases = values, phases
        self.part, self.layout, self.draft, self.indices = values.part, values.layout, values.draft, values.indices
        self.results: list[int] = []  # the values that are stored

    def join_amaxes(self, needed: set[int]) -> None:
        """Write the phases that find the amaxes of groups of rows among the values `needed`."""
        values = self.part.values
        levels: list[int] = []
        for value in values:
            levels.append(max((levels[a] for a in value.args), default=0) + (value.op in JOINED))
        for level in range(1, max(levels, default=0) + 1):
            amaxes = [i for i in sorted(needed) if values[i].op in JOINED and levels[i] == level]
            self.draft.use("magnitude")
            for i in amaxes:
                self.phases.join(i, self.values.magnitudes(values[i].args[0]), "tl.maximum({}, {})")
            self.phases.end()
            for i in amaxes:
                amax = self._amax_of_groups(values[i], Name(f"acc{i}"))
                self.values.define(i, Assign(Name(f"v{i}"), amax), self.draft.body)

    def _amax_of_groups(self, value: Value, joined_rows: Expression) -> Expression:
        """Return the amaxes of groups of rows. Row n of `joined_rows` is the greatest of rows 4 n to 4 n + 3."""
        size, (_, grouped) = value.params[0], GROUP_REDUCTIONS[value.op]
        shape = self.layout.shape(ELEMENT)
        return expr(f"{{}}{TO_FLOAT}", max_of_groups(joined_rows, shape, size // STEP, size if grouped else 1))

    def finish(self) -> None:
        """Write the last phase. It is called four times before anything is stored: loads come first."""
        returned: list[Expression] = []
        for store in self.part.stores:
            i, extent = store.value, self.part.extents[store.value]
            if extent[0] == 1 and i not in self.results and self.part.values[i].op not in ACCUMULATED:
                self.results.append(i)
                x: Expression = self.values.value(i)
                exists = self.indices.mask(extent)
                if exists and any(s.row_multiple * s.col_multiple > 1 for s in self.part.stores if s.value == i):
                    x = expr("tl.where({}, {}, 0.0)", exists, x)
                returned.append(x)
        self.phases.end(onto=self.layout.loops)
        last = self.phases.phases[-1]
        last.returned = returned
        last.doc = f"Rows `row`, `row` + {STEP}, `row` + {2 * STEP}, … of a tile."
        results = (Name(f"q{row}") for row in range(STEP))
        self.draft.body.append(Assign(QUARTERS, expr("({})", joined(", ", results))))

    def store(self, store: Store, dtype: str) -> None:
        """Store a result of all four as it is: a tensor after the other."""
        value, extent = self.part.values[store.value], self.part.stored_extent(store)
        x: Apply = expr(f"{{}}[{{}}][{self.results.index(store.value)}]", QUARTERS, ROW)
        if value.op == "quantize":
            self.draft.use(f"to_{value.params[0]}")
            x = expr(f"to_{value.params[0]}({{}})", x)
        elif not dtype.startswith(("float32", "int", "bool")):
            x = expr(f"{{}}.to(tl.{dtype})", x)
        rows = self._rows_of_one()
        if self.layout.is_wide_store(store, self.layout.covered[0]):
            rows = expr("{}.to(tl.int64)", rows)
        terms = [size_of(store.offset)] if store.offset else []
        terms.append(rows if store.lead == 1 else expr("{} * {}", rows, size_of(store.lead)))
        terms += [self.indices.vector(1, extent[1])] if extent[1] else []
        mask = self._mask_of_one(store)
        if not extent[1] and self.layout.tiling.col_blocks > 1:
            mask = all_of(mask, expr("({} == 0)", COL_BLOCK))
        pointer = self.indices.pointer(store.buffer, dtype)
        write = Write(joined(" + ", [pointer, *terms]), x, mask)
        self.draft.body.append(For(ROW, expr(f"tl.static_range({STEP})"), (write,)))

    def _rows_of_one(self) -> Expression:
        """Return the rows of tensor number `row`, outside of its function."""
        self.draft.add_once(self.draft.body, Assign(ROWS, self.indices.rows_of_first()))
        return expr("({} + {})", ROWS, ROW)

    def _mask_of_one(self, store: Store) -> Expression | None:
        """Return the mask of a store of one tensor."""
        extent, multiples = self.part.stored_extent(store), (store.row_multiple, store.col_multiple)
        rows, cols = (self.layout.limit(d, extent[d], multiples[d]) if extent[d] else None for d in (0, 1))
        return all_of(
            expr("({} < {})", self._rows_of_one(), rows) if rows else None,
            expr("({} < {})", self.indices.vector(1, extent[1]), cols) if cols else None,
        )

    def store_words(self, store: Store) -> None:
        """Store the codes of four rows as one word, transposed."""
        helper = f"words_{self.part.values[store.value].params[0]}"
        self.draft.use(helper)
        words, vector = self.layout.tiling.block_rows // STEP, Name("words_t")
        numbers = expr(f"{{}} * {words} + tl.arange(0, {words})[None, :]", ROW_BLOCK)
        self.draft.add_once(self.draft.body, Assign(vector, numbers))
        buffer, pointer = Name(f"y{store.buffer}"), Name(f"y{store.buffer}_words")
        cast = Assign(pointer, expr("{}.to(tl.pointer_type(tl.int32), bitcast=True)", buffer))
        self.draft.add_once(self.draft.before, cast)
        cols = self.indices.vector(1, 1, across=True)
        wide = expr("{}.to(tl.int64)", cols) if self.layout.is_wide_store(store, self.layout.covered[1]) else cols
        lead, start = _words(store.lead), _words(store.offset)
        offset = [start] if store.offset else []
        limits = (self.layout.limit(d, 1, (store.row_multiple, store.col_multiple)[d]) for d in (0, 1))
        rows_left, cols_left = limits
        mask = all_of(
            expr(f"({{}} * {STEP} < {{}})", vector, rows_left) if rows_left else None,
            expr("({} < {})", cols, cols_left) if cols_left else None,
        )
        slot = self.results.index(store.value)
        codes = joined(", ", (expr(f"{{}}[{row}][{slot}]", QUARTERS) for row in range(STEP)))
        place = joined(" + ", [pointer, *offset, expr("{} * {}", wide, lead), vector])
        self.draft.body.append(Write(place, expr(f"tl.trans({helper}({{}}))", codes), mask))


def _words(size: Size) -> Expression:
    """Return how many words a lead or an offset is, of which they are a whole number."""
    return expr(str(size // STEP)) if isinstance(size, int) else expr(f"({{}} // {STEP})", Name(size))
