"""The stores of a part: those of each tile, and those of what a program has joined of all of its tiles."""

from __future__ import annotations

from fp8compile.kernels.codegen.emit.indices import COL_BLOCK, FIRST_ROW_BLOCK, PID, ROW_BLOCK
from fp8compile.kernels.codegen.emit.packed_transpose import PackedTranspose
from fp8compile.kernels.codegen.emit.phases import Phases
from fp8compile.kernels.codegen.emit.values import Values
from fp8compile.kernels.codegen.schedule.tile_layout import size_of
from fp8compile.kernels.codegen.source.statements import Add, Assign, Expression, Name, Write, all_of, expr, joined
from fp8compile.kernels.codegen.spec.reductions import TO_FLOAT
from fp8compile.kernels.codegen.spec.region import COLUMN, ELEMENT, NUMBER, PARTIALS, Buffer, Extent, Store, Value


class Stores:
    """Writes the stores of one part."""

    def __init__(
        self, buffers: tuple[Buffer, ...], values: Values, phases: Phases, packed: PackedTranspose | None
    ) -> None:
        self.buffers, self.values, self.phases, self.packed = buffers, values, phases, packed
        self.part, self.layout, self.draft, self.indices = values.part, values.layout, values.draft, values.indices

    def store(self, store: Store) -> None:
        """Write what `store` says, and the values that it needs."""
        value = self.part.values[store.value]
        if value.op in PARTIALS:
            self._store_partial(store, value)
            return
        extent = self.part.stored_extent(store)
        dtype = self.buffers[store.buffer].dtype
        name = self.values.value(store.value)
        if self.packed and extent[0] == 1:
            if store.transposed:
                self.packed.store_words(store)
            else:
                self.packed.store(store, dtype)
        elif extent == NUMBER:
            offset = [size_of(store.offset)] if store.offset else []
            place = joined(" + ", [self.indices.pointer(store.buffer, dtype), *offset])
            statements = self.draft.before if self.layout.loops else self.draft.body
            statements.append(Write(place, name, expr("{} == 0", PID)))
        else:
            self._store_tile(store, extent, dtype)

    def _store_tile(self, store: Store, extent: Extent, dtype: str) -> None:
        tiling = self.layout.tiling
        pointer = self.indices.pointer(store.buffer, dtype)
        x, mask = self._stored(store, extent, dtype)
        place = joined(" + ", [pointer, *self._offset_terms(store, extent)])
        if not extent[0]:
            mask = all_of(mask, expr("({} == 0)", ROW_BLOCK))
        elif not extent[1] and tiling.col_blocks > 1 and not tiling.owns_rows:
            mask = all_of(mask, expr("({} == 0)", COL_BLOCK))
        statements = self.draft.tile if extent[1] and tiling.owns_rows else self.draft.body
        statements.append(Write(place, x, mask))

    def _stored(self, store: Store, extent: Extent, dtype: str) -> tuple[Expression, Expression | None]:
        """Return what to store, and under which mask. Beyond the last row and column that exist, zeros."""
        x: Expression = Name(f"v{store.value}")
        exists = self.indices.mask(extent)
        if exists and (store.row_multiple > 1 or store.col_multiple > 1):
            x = expr("tl.where({}, {}, 0)", exists, x)
        shape = self.layout.shape(extent)
        if shape != self.layout.shape(self.part.extents[store.value]):
            x = expr("tl.broadcast_to({}, {})", x, str(shape))
        if not dtype.startswith(("float8", "float32", "int", "bool")):
            x = expr(f"{{}}.to(tl.{dtype})", x)
        if store.transposed:
            x = expr("tl.trans({})", x)
        return x, self.indices.mask(extent, store.transposed, (store.row_multiple, store.col_multiple))

    def _offset_terms(self, store: Store, extent: Extent) -> list[Expression]:
        """Return the terms of the offsets at which the elements of a tile lie in the buffer."""
        outer, inner = (1, 0) if store.transposed else (0, 1)
        terms = [size_of(store.offset)] if store.offset else []
        if extent[outer]:
            axis: Expression = self.indices.vector(outer, extent[outer], store.transposed)
            if self.layout.is_wide_store(store, self.layout.covered[outer]):
                axis = expr("{}.to(tl.int64)", axis)
            terms.append(axis if store.lead == 1 else expr("{} * {}", axis, size_of(store.lead)))
        if extent[inner]:
            terms.append(self.indices.vector(inner, extent[inner], store.transposed))
        return terms

    # ---- what a program finds over all of its tiles ---------------------------------------------------------------

    def _store_partial(self, store: Store, value: Value) -> None:
        """Store what this program has found."""
        self._accumulate_once(store.value, value)
        found: Expression = Name(f"acc{store.value}")
        buffer = Name(f"y{store.buffer}")
        cast = "" if value.op == "col_sum" else TO_FLOAT
        if value.op != "col_sum" and self._keeps(value):
            found = expr("magnitude({})", found)
        if value.op == "all_amax":
            rows, cols = self.layout.shape(self.part.extents[value.args[0]])
            largest = expr(f"tl.max(tl.reshape({{}}, [{rows * cols}]), 0){cast}", found)
            self.draft.after.append(Write(expr("{} + {}", buffer, PID), largest))
            return
        total = expr(f"tl.{'sum' if value.op == 'col_sum' else 'max'}({{}}, 0, keep_dims=True){cast}", found)
        mask = self.indices.mask(COLUMN)
        row = expr("{} * {}", FIRST_ROW_BLOCK, self.part.cols)
        place = joined(" + ", [buffer, row, self.indices.vector(1, 1)])
        self.draft.after.append(Write(place, total, mask))

    def accumulate(self) -> None:
        """Join what programs find over all of their tiles, before the last phase of a tile ends."""
        for store in self.part.stores:
            value = self.part.values[store.value]
            if value.op in PARTIALS:
                self._accumulate_once(store.value, value)

    def _accumulate_once(self, number: int, value: Value) -> None:
        if number not in self.values.done:  # several may store it: two layers' biases have the same gradient
            self.values.done.add(number)
            self._accumulate(number, value)

    def _accumulate(self, number: int, value: Value) -> None:
        """Join the tiles of this program into acc<number>."""
        total, is_sum = Name(f"acc{number}"), value.op == "col_sum"
        across, keeps = self._is_across(value), self._keeps(value)
        x, shape = self._accumulated(value)
        joins = "{} + {}" if is_sum else "larger({}, {})" if keeps else "tl.maximum({}, {})"
        if keeps:
            self.draft.before.append(Assign(total, expr(f"tl.zeros({shape}, tl.float32)")))
        tiling = self.layout.tiling
        if (tiling.held and across) or (tiling.packed_transpose and self.layout.is_interleaved(value.args[0])):
            self.phases.join(number, x, joins)
        elif keeps:
            statements = self.draft.tile if across else self.draft.body
            statements.append(Add(total, x) if is_sum else Assign(total, expr(joins, total, x)))
        else:
            self.draft.body.append(Assign(total, x))

    def _is_across(self, value: Value) -> bool:
        """Return True if what is joined varies along the columns."""
        return self.part.extents[value.args[0]][1] > 0

    def _keeps(self, value: Value) -> bool:
        """Return True if a program joins several tiles, onto zeros that it starts with."""
        return self.layout.loops or (self.layout.tiling.sweeps and self._is_across(value))

    def _accumulated(self, value: Value) -> tuple[Expression, list[int]]:
        """Return what is joined of a tile: values, or magnitudes as integers where no other tile follows; and its
        shape."""
        i = value.args[0]
        extent = self.part.extents[i]
        keeps = self._keeps(value)
        if value.op != "col_sum":
            self.draft.use("magnitude")
            if keeps:
                self.draft.use("larger")
        if value.op == "col_sum" or (value.op == "col_amax" and keeps):
            return self.values.full(i, "0.0"), self.layout.shape(ELEMENT)
        if value.op == "col_amax":
            return self.values.magnitudes(i), self.layout.shape(ELEMENT)
        mask = self.indices.mask(extent)
        x: Expression = self.values.value(i)
        x = expr("tl.where({}, {}, 0.0)", mask, x) if mask else x
        shape = self.layout.shape(extent)
        x = expr("tl.broadcast_to({}, {})", x, str(shape)) if extent == NUMBER else x
        return x if keeps else expr("magnitude({})", x), shape
