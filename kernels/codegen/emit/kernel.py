"""Spec and schedule → Triton source that reads as if written by hand.

A part becomes a function of its program's number: the tile it owns, what is the same for all its tiles, and a walk down
the rows. Here is the order of all this. Where elements lie is written by `indices.py`, what is computed by `values.py`,
what is stored by `stores.py`; three kinds of tiles take steps of their own: `sweeps.py`, `held_rows.py`,
`packed_transpose.py`. All write statements (`kernels/codegen/source/statements.py`), which become text at the end. The
helpers a kernel calls (`kernels/codegen/source/helpers.py`) are written into its file, so that the file needs nothing
but Triton.

Two targets: "cuda", and "interpreter", which cannot run inline assembly or libdevice.
"""

from __future__ import annotations

from fp8compile.formats import ceil_div
from fp8compile.kernels.codegen.emit import sweeps
from fp8compile.kernels.codegen.emit.held_rows import hold_rows, tiles_of_rows
from fp8compile.kernels.codegen.emit.indices import (
    BAND,
    COL_BLOCK,
    FIRST_ROW_BLOCK,
    PID,
    ROW_BLOCK,
    Indices,
)
from fp8compile.kernels.codegen.emit.packed_transpose import EVERY_FOURTH_ROW, PackedTranspose
from fp8compile.kernels.codegen.emit.phases import Phases
from fp8compile.kernels.codegen.emit.stores import Stores
from fp8compile.kernels.codegen.emit.values import Values
from fp8compile.kernels.codegen.schedule.tile_layout import TileLayout, size_of
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling
from fp8compile.kernels.codegen.source.function_draft import FunctionDraft
from fp8compile.kernels.codegen.source.helpers import HELPERS, with_needed
from fp8compile.kernels.codegen.source.printer import source_of
from fp8compile.kernels.codegen.source.statements import (
    Assign,
    Call,
    Expression,
    For,
    Function,
    If,
    Name,
    Statement,
    expr,
    joined,
    replaced,
)
from fp8compile.kernels.codegen.spec.region import ELEMENT, PARTIALS, ROW_REDUCTIONS, Part, Region, Store, reached


def kernel_source(region: Region, schedule: Schedule, name: str, target: str) -> str:
    """Return the functions of the kernel: helpers, parts, and the kernel `name` that hands programs to parts."""
    single = len(region.parts) == 1
    functions: list[Function] = []
    calls: list[Function] = []
    helpers: list[str] = []
    for i, (part, tiling) in enumerate(zip(region.parts, schedule.tilings, strict=True)):
        writer = _PartWriter(region, part, tiling, target, schedule.stages)
        functions += writer.functions(name if single else f"part{i}")
        calls.append(functions[-1])
        helpers += writer.draft.helpers
    if not single:
        functions.append(_dispatch(region, schedule, name, calls))
    sources = [HELPERS[h].for_target(target) for h in with_needed(helpers)]
    return "\n\n".join([*sources, *map(source_of, functions)])


def arguments(region: Region) -> list[str]:
    """Return the names of the kernel's arguments: inputs x0…, outputs y0…, sizes n0…."""
    return [
        *(f"x{i}" for i in range(region.tensors)),
        *(f"y{i}" for i in range(len(region.buffers))),
        *region.sizes,
    ]


def _dispatch(region: Region, schedule: Schedule, name: str, parts: list[Function]) -> Function:
    """Return the kernel of several parts, each of which has so many programs, one part after the other."""
    branches: list[tuple[Expression | None, tuple[Statement, ...]]] = []
    start = 0
    for i, (part, tiling) in enumerate(zip(parts, schedule.tilings, strict=True)):
        number = expr(f"{{}} - {start}", PID) if start else PID
        call = expr(f"{part.name}({{}})", joined(", ", [number, *part.arguments[1:]]))
        start += tiling.programs
        is_last = i + 1 == len(parts)
        branches.append((None if is_last else expr(f"{{}} < {start}", PID), (Call(call),)))
    body = (_PROGRAM_NUMBER, If(tuple(branches)))
    return Function(name, tuple(map(Name, arguments(region))), body)


WIDEST_STORED_BEFORE = 8192  # columns of a tile; tiles of 16384 were 3 % slower with early stores
_PROGRAM_NUMBER = Assign(PID, expr("tl.program_id(0)"))


class _PartWriter:
    """Writes one part."""

    def __init__(self, region: Region, part: Part, tiling: Tiling, target: str, stages: int) -> None:
        self.region, self.part, self.tiling = region, part, tiling
        self.ahead = f", num_stages={stages}" if stages > 1 and target != "interpreter" else ""
        self.layout = TileLayout(part, tiling)
        self.draft = FunctionDraft(tiling.owns_rows or tiling.packed_transpose)
        self.indices = Indices(self.layout, self.draft)
        self.values = Values(self.layout, self.draft, self.indices, target)
        tensors = EVERY_FOURTH_ROW if tiling.packed_transpose else None
        tensors = tiles_of_rows(tiling.col_blocks, self.indices) if tiling.held else tensors
        self.phases = Phases(self.draft, self.indices, tensors)
        self.packed = PackedTranspose(self.values, self.phases) if tiling.packed_transpose else None
        self.stores = Stores(region.buffers, self.values, self.phases, self.packed)
        self.stored: list[Store] = []  # those that are written already

    def functions(self, name: str) -> list[Function]:
        """Return the functions of the part's phases, and the part itself, which is called `name`."""
        single = len(self.region.parts) == 1
        self._write_body()
        phases = self.phases.finish("" if single else f"_of_{name}")
        body = (*([_PROGRAM_NUMBER] if single else []), *self._assembled())
        given = () if single else (PID,)
        return [*phases, Function(name, (*given, *self._arguments()), body)]

    def _arguments(self) -> list[Name]:
        """Return what the function is given: everything in a kernel of its own, else what the part uses."""
        if len(self.region.parts) == 1:
            return [Name(a) for a in arguments(self.region)]
        inputs, outputs = {t for i in self.part.inputs for t in i.tensors}, {s.buffer for s in self.part.stores}
        used = [*(f"x{n}" for n in sorted(inputs)), *(f"y{n}" for n in sorted(outputs))]
        return [Name(a) for a in (*used, *Region((self.part,), ()).sizes)]

    # ---- what is computed and stored ------------------------------------------------------------------------------

    def _write_body(self) -> None:
        if self.tiling.sweeps:
            sweeps.reduce_rows(self.values)
        needed = self._reached([s.value for s in self.part.stores])
        if self.part.only_if is not None:
            self.values.value(self.part.only_if)
        if self.tiling.held:
            hold_rows(needed, self.values, self.phases, self._store_before)
        if self.packed:
            self.packed.join_amaxes(needed)
        stored_values = self._stored_values(needed)
        if self._reduces_in_one_tile():
            for i in stored_values:
                if self.part.levels[i] == 0:
                    self.values.value(i)
            self._store_before(1)
        for i in stored_values:
            self.values.value(i)
        if self.packed:
            self.stores.accumulate()
            self.packed.finish()
        for store in self._stores_in_order():
            if store not in self.stored:
                self.stores.store(store)
        if self.tiling.sweeps:
            sweeps.end_sweep(self.values)
        self.phases.end(onto=self.layout.loops)

    def _store_before(self, level: int) -> None:
        """Store the elements that are known before the reductions of this level, so that no register holds them."""
        for store in self._stores_in_order():
            is_known = self.part.levels[store.value] < level and self.part.stored_extent(store) == ELEMENT
            if is_known and store not in self.stored and self.part.values[store.value].op not in PARTIALS:
                self.stored.append(store)
                self.stores.store(store)

    def _reduces_in_one_tile(self) -> bool:
        """Return True if a tile has whole rows, which it reduces before it stores what is made of the results."""
        tiling = self.tiling
        if tiling.held or tiling.sweeps or self.packed or tiling.block_cols > WIDEST_STORED_BEFORE:
            return False
        return max(self.part.levels, default=0) > 0

    def _stored_values(self, needed: set[int]) -> list[int]:
        """Return what is computed before the first store: what is loaded, then the rest in the order of the spec.

        All of it, which is twice as fast where tiles are transposed; but wide rows only load, and compute each result
        as they store it, so that registers hold one at a time. Rows that are held have loaded already.
        """
        if self.tiling.held:
            return []
        values = self.part.values
        if self.layout.holds_wide_rows:
            return sorted(i for i in needed if values[i].op == "load")
        return sorted((i for i in needed if values[i].op not in PARTIALS), key=lambda i: (values[i].op != "load", i))

    def _stores_in_order(self) -> list[Store]:
        """Return row-major stores before transposed ones; of wide rows first what needs most tensors, which then are
        free."""
        stores = sorted(self.part.stores, key=lambda s: s.transposed)
        if not self.layout.holds_wide_rows:
            return stores
        loads = {s: sum(self.part.values[i].op == "load" for i in self._reached([s.value])) for s in stores}
        return sorted(stores, key=lambda s: -loads[s])

    def _reached(self, starts: list[int]) -> set[int]:
        """Return the values of which these are made; in sweeps, reductions are made already."""
        return reached(self.part.values, starts, lambda v: not self.tiling.sweeps or v.op not in ROW_REDUCTIONS)

    # ---- which tiles a program has ----------------------------------------------------------------------------------

    def _assembled(self) -> list[Statement]:
        """Return the body of the function: which tiles the program has, and all that was written for them."""
        statements: list[Statement] = []
        first = PID
        if self.tiling.col_blocks > 1 and not self.tiling.owns_rows:
            first, blocks = FIRST_ROW_BLOCK, self.tiling.col_blocks
            statements.append(Assign(COL_BLOCK, expr(f"{{}} % {blocks}", PID)))
            statements.append(Assign(first, expr(f"{{}} // {blocks}", PID)))
        programs = self.tiling.row_programs
        if self.layout.band_rows:  # a program walks down the rows of one band
            programs //= self.part.bands
            statements.append(Assign(BAND, expr(f"{{}} // {programs}", first)))
        statements += self.draft.before
        if self.layout.loops and self.draft.body:
            walk = For(ROW_BLOCK, self._span(first, programs), tuple(self.draft.body))
            only_if = self.part.only_if
            statements.append(walk if only_if is None else If(((Name(f"v{only_if}"), (walk,)),)))
        else:
            statements += [replaced(statement, {ROW_BLOCK: first}) for statement in self.draft.body]
        return statements + [replaced(statement, {FIRST_ROW_BLOCK: first}) for statement in self.draft.after]

    def _span(self, first: Name, programs: int) -> Expression:
        """Return the tiles down which a program walks, of all or of its band: every n-th one, or a run of its own."""
        band = self.layout.band_rows // self.tiling.block_rows
        count = band or self.layout.row_blocks
        number = expr(f"{{}} % {programs}", first) if band else first
        end = expr(f"({{}} + 1) * {band}", BAND) if band else expr(str(count)) if count else self._covered_blocks()
        if not self.layout.walks_in_runs:
            return self._range(self._in_band(number, band), end, f", {programs}")
        run = expr(str(ceil_div(count, programs))) if count else expr(f"tl.cdiv({{}}, {programs})", end)
        start = self._in_band(expr("{} * {}", number, run), band)
        stop = self._in_band(expr("({} + 1) * {}", number, run), band)
        is_whole = count is not None and count % programs == 0
        return self._range(start, stop if is_whole else expr("tl.minimum({}, {})", stop, end), "")

    def _in_band(self, tile: Expression, band: int) -> Expression:
        """Return the number of a tile of which that within a band of so many tiles, if there are any, is known."""
        return expr(f"{{}} * {band} + {{}}", BAND, tile) if band else tile

    def _range(self, start: Expression, end: Expression, step: str) -> Expression:
        word = "tl.range" if self.ahead else "range"
        return expr(f"{word}({{}}, {{}}{step}{self.ahead})", start, end)

    def _covered_blocks(self) -> Expression:
        """Return how many tiles cover rows whose number comes with the call."""
        multiple = max((s.row_multiple for s in self.part.stores), default=1)
        rows = size_of(self.part.rows)
        rows = expr(f"tl.cdiv({{}}, {multiple}) * {multiple}", rows) if multiple > 1 else rows
        return expr(f"tl.cdiv({{}}, {self.tiling.block_rows})", rows)
