"""Spec and schedule → Triton source that reads as if written by hand.

A part becomes a function of its program's number: the tile it owns, what is the same for all its tiles, and a walk down
the rows. Where rows are wider than a tile and reduced, a program sweeps over the tiles of its rows several times: once
for each reduction that another one needs, and once to store. Here is the order of all this, and what is stored; where
elements lie and how values are computed are `kernels/codegen/emit_tile.py` and `emit_values.py`. The helpers a kernel
calls (`kernels/codegen/emit_helpers.py`) are written into its file, so that the file needs nothing but Triton.

Two targets: "cuda", and "interpreter", which cannot run inline assembly or libdevice.
"""

from __future__ import annotations

import re

from fp8compile.kernels.codegen.emit_held import Held
from fp8compile.kernels.codegen.emit_helpers import HELPERS, NEEDS
from fp8compile.kernels.codegen.schedule import Schedule
from fp8compile.kernels.codegen.spec import (
    COLUMN,
    ELEMENT,
    NUMBER,
    PARTIALS,
    ROW_REDUCTIONS,
    Extent,
    Region,
    Store,
    Value,
)


def kernel_source(region: Region, schedule: Schedule, name: str, target: str) -> str:
    """The functions of the kernel: helpers, parts, and the kernel `name` that hands programs to parts."""
    tiled = zip(region.parts, schedule.tilings, strict=True)
    parts = [_Emitter(region, part, tiling, target, schedule.stages) for part, tiling in tiled]
    bodies = [part.function(f"part{i}" if len(parts) > 1 else name) for i, part in enumerate(parts)]
    if len(parts) > 1:
        bodies.append(_dispatch(region, schedule, name, parts))
    helpers: dict[str, None] = {}
    for part in parts:
        for helper in part.helpers:
            _need(helper, helpers)
    return "\n\n".join([*(HELPERS[h].for_target(target) for h in helpers), *bodies])


def _need(helper: str, found: dict[str, None]) -> None:
    for other in NEEDS.get(helper, ()):
        _need(other, found)
    found[helper] = None


def arguments(region: Region) -> list[str]:
    """Names of the kernel's arguments: inputs x0…, outputs y0…, sizes n0…."""
    return [
        *(f"x{i}" for i in range(region.tensors)),
        *(f"y{i}" for i in range(len(region.buffers))),
        *region.sizes,
    ]


def _dispatch(region: Region, schedule: Schedule, name: str, parts: list[_Emitter]) -> str:
    lines = ["@triton.jit", f"def {name}({', '.join(arguments(region))}):", "    pid = tl.program_id(0)"]
    start = 0
    for i, (part, tiling) in enumerate(zip(parts, schedule.tilings, strict=True)):
        call = f"part{i}({', '.join([f'pid - {start}' if start else 'pid', *part.arguments])})"
        if i + 1 < len(parts):
            lines += [f"    {'elif' if i else 'if'} pid < {start + tiling.programs}:", f"        {call}"]
        else:
            lines += ["    else:", f"        {call}"]
        start += tiling.programs
    return "\n".join(lines)


class _Emitter(Held):
    """Writes one part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.single = len(self.region.parts) == 1
        used = sorted({f"x{i.tensor}" for i in self.part.inputs}) + sorted({f"y{s.buffer}" for s in self.part.stores})
        sizes = Region((self.part,), ()).sizes
        self.arguments = arguments(self.region) if self.single else [*sorted(used, key=_by_number), *sizes]

    # ---- the whole function -------------------------------------------------------------------------------------

    def function(self, name: str) -> str:
        for level in range(1, max(self.levels, default=0) + 1) if self.sweeps else ():
            self._reducing_sweep(level)
        self.suffix = "" if self.single else f"_of_{name}"
        needed = self._reached([s.value for s in self.part.stores])
        if self.tiling.held:
            self._hold(needed)
        if self.tiling.quarters:
            self._join_amaxes(needed)
        for i in self._stored_values():
            self._value(i)
        if self.tiling.quarters:
            self._finish_quarters()
        for store in self._stores_in_order():
            self._store(store)
        self._end_sweep()
        self._end_phase(onto=self.loops)
        phases = self._finish_phases()
        head = ["@triton.jit", f"def {name}({', '.join(([] if self.single else ['pid']) + self.arguments)}):"]
        lines = ["pid = tl.program_id(0)"] if self.single else []
        first = "pid"
        if self.tiling.col_blocks > 1 and not self.owns_rows:
            first = "first_row_block"
            blocks = self.tiling.col_blocks
            lines += [f"col_block = pid % {blocks}", f"first_row_block = pid // {blocks}"]
        programs = self.tiling.row_programs
        if self.band_rows:  # a program walks down the rows of one band
            programs //= self.part.bands
            lines.append(f"band = {first} // {programs}")
        lines += self.before
        if self.loops and self.body:
            blocks = self.row_blocks if self.row_blocks is not None else self._covered_blocks()
            ahead = f", num_stages={self.stages}" if self.stages > 1 and self.target != "interpreter" else ""
            start = first
            if self.band_rows:
                blocks = self.band_rows // self.tiling.block_rows
                start, blocks = f"band * {blocks} + {first} % {programs}", f"(band + 1) * {blocks}"
            span = f"{start}, {blocks}, {programs}{ahead}"
            lines.append(f"for row_block in {'tl.range' if ahead else 'range'}({span}):")
            lines += [f"    {line}" for line in self.body]
        else:
            lines += [re.sub(r"\brow_block\b", first, line) for line in self.body]
        lines += [re.sub(r"\bfirst_row_block\b", first, line) for line in self.after]
        return "\n\n".join([*phases, "\n".join(head + [f"    {line}" for line in lines])])

    def _stored_values(self) -> list[int]:
        """What is computed before the first store: what is loaded, then the rest in the order of the spec.

        All of it, which is twice as fast where tiles are transposed; but wide rows only load, and compute each result
        as they store it, so that registers hold one at a time. Rows that are held have loaded already.
        """
        if self.tiling.held:
            return []
        found = self._reached([s.value for s in self.part.stores])
        values = self.part.values
        if self._holds_wide_rows():
            return sorted(i for i in found if values[i].op == "load")
        return sorted((i for i in found if values[i].op not in PARTIALS), key=lambda i: (values[i].op != "load", i))

    def _stores_in_order(self) -> list[Store]:
        """Row-major ones before transposed ones; of wide rows first what needs most tensors, which then are free."""
        stores = sorted(self.part.stores, key=lambda s: s.transposed)
        if not self._holds_wide_rows():
            return stores
        loads = {s: sum(self.part.values[i].op == "load" for i in self._reached([s.value])) for s in stores}
        return sorted(stores, key=lambda s: -loads[s])

    def _reached(self, stack: list[int]) -> set[int]:
        """The values that these are made of, themselves included."""
        found: set[int] = set()
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                if not self.sweeps or self.part.values[i].op not in ROW_REDUCTIONS:
                    stack += self.part.values[i].args
        return found

    def _reducing_sweep(self, level: int) -> None:
        """Read the tiles of a row once for all reductions of this level."""
        first, last = [], []
        for i, value in enumerate(self.part.values):
            if value.op not in ROW_REDUCTIONS or self.levels[i] != level:
                continue
            text, zero, join, total = self._reduction(value)
            first.append(f"acc{i} = {zero}")
            self.tile.append(f"acc{i} = {join.format(f'acc{i}', text)}")
            last.append(f"v{i} = {total.format(f'acc{i}')}")
            self.done.add(i)
        self.body += first
        self._end_sweep()
        self.body += last

    def _end_sweep(self) -> None:
        if not self.tile or not self.sweeps:
            return
        self.body.append(f"for col_block in range({self.tiling.col_blocks}):")
        self.body += [f"    {line}" for line in self.tile]
        self.tile.clear()
        self.done -= self.in_tile
        self.in_tile.clear()
        self.axes = {axis for axis in self.axes if not axis.startswith("cols")}

    def _covered_blocks(self) -> str:
        multiple = max((s.row_multiple for s in self.part.stores), default=1)
        rows = f"tl.cdiv({self.part.rows}, {multiple}) * {multiple}" if multiple > 1 else str(self.part.rows)
        return f"tl.cdiv({rows}, {self.tiling.block_rows})"

    # ---- stores -------------------------------------------------------------------------------------------------

    def _store(self, store: Store) -> None:
        value = self.part.values[store.value]
        if value.op in PARTIALS:
            self._store_partial(store, value)
            return
        extent = self.part.stored_extent(store)
        self._value(store.value)
        if self.tiling.quarters and extent[0] == 1:
            self._store_quarters(store)
            return
        dtype = self.region.buffers[store.buffer].dtype
        pointer = self._pointer(store, dtype)
        if extent == NUMBER:
            place = f"{pointer} + {store.offset}" if store.offset else pointer
            (self.before if self.loops else self.body).append(f"tl.store({place}, v{store.value}, mask=pid == 0)")
            return
        text, mask = self._stored(store, extent, dtype)
        index = self._store_index(store, extent)
        lines = self.tile if extent[1] and self.owns_rows else self.body
        if not extent[0]:
            mask = " & ".join(filter(None, [mask, "(row_block == 0)"]))
        elif not extent[1] and self.tiling.col_blocks > 1 and not self.owns_rows:
            mask = " & ".join(filter(None, [mask, "(col_block == 0)"]))
        lines.append(f"tl.store({pointer} + {index}, {text}{f', mask={mask}' if mask else ''})")

    def _stored(self, store: Store, extent: Extent, dtype: str) -> tuple[str, str]:
        """What to store, and under which mask. Beyond the last row and column that exist, zeros."""
        text = f"v{store.value}"
        pads = store.row_multiple > 1 or store.col_multiple > 1
        exists = self._mask(extent)
        if pads and exists:
            text = f"tl.where({exists}, {text}, 0)"
        if self._shape(extent) != self._shape_of_value(store.value):
            text = f"tl.broadcast_to({text}, {self._shape(extent)})"
        if not dtype.startswith(("float8", "float32", "int", "bool")):
            text = f"{text}.to(tl.{dtype})"
        if store.transposed:
            text = f"tl.trans({text})"
        return text, self._mask(extent, store.transposed, (store.row_multiple, store.col_multiple))

    def _shape_of_value(self, i: int) -> list[int]:
        return self._shape(self.part.extents[i])

    def _store_index(self, store: Store, extent: Extent) -> str:
        outer, inner = (1, 0) if store.transposed else (0, 1)
        terms = [str(store.offset)] if store.offset else []
        if extent[outer]:
            axis = self._axis(outer, extent[outer], store.transposed)
            if self._is_wide_store(store, (self.rows_covered, self.cols_covered)[outer]):
                axis = f"{axis}.to(tl.int64)"
            terms.append(axis if store.lead == 1 else f"{axis} * {store.lead}")
        if extent[inner]:
            terms.append(self._axis(inner, extent[inner], store.transposed))
        return " + ".join(terms)

    def _store_partial(self, store: Store, value: Value) -> None:
        """Store what this program has found over all of its tiles."""
        if store.value not in self.done:  # several may store it: two layers' biases have the same gradient
            self.done.add(store.value)
            self._accumulate(store.value, value)
        name = f"acc{store.value}"
        cast = "" if value.op == "col_sum" else ".to(tl.float32, bitcast=True)"
        if value.op == "all_amax":
            rows, cols = self._shape(self.part.extents[value.args[0]])
            largest = f"tl.max(tl.reshape({name}, [{rows * cols}]), 0)"
            self.after.append(f"tl.store(y{store.buffer} + pid, {largest}{cast})")
            return
        total = f"tl.{'sum' if value.op == 'col_sum' else 'max'}({name}, 0, keep_dims=True){cast}"
        mask = self._mask(COLUMN)
        self.after.append(
            f"tl.store(y{store.buffer} + first_row_block * {self.part.cols} + {self._axis(1, 1)}, {total}"
            f"{f', mask={mask}' if mask else ''})"
        )

    def _accumulate(self, number: int, value: Value) -> None:
        """Join the tiles of this program into acc<number>."""
        i = value.args[0]
        name = f"acc{number}"
        is_sum = value.op == "col_sum"
        if not is_sum:
            self._use("magnitude")
        extent = self.part.extents[i]
        if value.op == "all_amax":
            mask = self._mask(extent)
            text = self._value(i)
            text = f"tl.where({mask}, {text}, 0.0)" if mask else text
            shape = self._shape(extent)
            text = f"tl.broadcast_to({text}, {shape})" if extent == NUMBER else text
        else:
            text, shape = self._full(i, "0.0"), self._shape(ELEMENT)
        text = text if is_sum else f"magnitude({text})"
        held = self.tiling.held and extent[1] > 0
        if self.loops or (self.sweeps and extent[1]):
            zero = f"tl.zeros({shape}, tl.{'float32' if is_sum else 'int32'})"
            self.before.append(f"{name} = {zero}")
        if held:
            self._join(number, text, "tl.maximum({}, {})")
        elif self.loops or (self.sweeps and extent[1]):
            lines = self.tile if extent[1] else self.body
            lines.append(f"{name} += {text}" if is_sum else f"{name} = tl.maximum({name}, {text})")
        else:
            self.body.append(f"{name} = {text}")


def _by_number(name: str) -> tuple[str, int]:
    return name[0], int(name[1:])
