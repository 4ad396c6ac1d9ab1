"""Spec and schedule → Triton source that reads as if written by hand.

A part becomes a function of its program's number: the tile it owns, what is the same for all its tiles, and a walk down
the rows. Where rows are wider than a tile and reduced, a program sweeps over the tiles of its rows several times: once
for each reduction that another one needs, and once to store. Sizes and strides that are numbers stand in the source as
numbers; a mask stands only where divisibility cannot be proven. The helpers a kernel calls (`kernels/emit_helpers.py`)
are written into its file, so that the file needs nothing but Triton.

Two targets: "cuda", and "interpreter", which cannot run inline assembly or libdevice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fp8compile.formats import FORMATS, ceil_div, round_up
from fp8compile.kernels import schedule as schedules
from fp8compile.kernels.emit_helpers import HELPERS, NEEDS
from fp8compile.kernels.expressions import EXPRESSIONS
from fp8compile.kernels.ranges import is_normal, is_within
from fp8compile.kernels.schedule import Schedule, Tiling
from fp8compile.kernels.spec import (
    COLUMN,
    ELEMENT,
    NUMBER,
    PARTIALS,
    ROW_REDUCTIONS,
    Digits,
    Extent,
    Part,
    Region,
    Size,
    Store,
    Value,
)  # fmt: skip

INT32_MAX = 2**31 - 1


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


@dataclass
class _Emitter:
    """Writes one part."""

    region: Region
    part: Part
    tiling: Tiling
    target: str
    stages: int = 1
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        part, tiling = self.part, self.tiling
        self.rows_covered, self.cols_covered = schedules.extent(part)
        rows = self.rows_covered
        self.row_blocks = max(1, ceil_div(rows, tiling.block_rows)) if isinstance(rows, int) else None
        self.loops = self.row_blocks is None or self.row_blocks > tiling.row_programs
        single = len(self.region.parts) == 1
        used = sorted({f"x{i.tensor}" for i in part.inputs}) + sorted({f"y{s.buffer}" for s in part.stores})
        sizes = Region((part,), ()).sizes
        self.arguments = arguments(self.region) if single else [*sorted(used, key=_by_number), *sizes]
        self.single = single
        self.before: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self.levels = part.levels
        self.sweeps = tiling.sweeps
        self.tile: list[str] = [] if self.sweeps else self.body  # what is done for each tile of a row
        self.axes: set[str] = set()  # index vectors that stand in the source
        self.done: set[int] = set()  # values that do
        self.in_tile: set[int] = set()  # of these, the ones that the current sweep computed

    # ---- the whole function -------------------------------------------------------------------------------------

    def function(self, name: str) -> str:
        for level in range(1, max(self.levels, default=0) + 1) if self.sweeps else ():
            self._reducing_sweep(level)
        for i in self._stored_values():
            self._value(i)
        for store in self._stores_in_order():
            self._store(store)
        self._end_sweep()
        head = ["@triton.jit", f"def {name}({', '.join(([] if self.single else ['pid']) + self.arguments)}):"]
        lines = ["pid = tl.program_id(0)"] if self.single else []
        first = "pid"
        if self.tiling.col_blocks > 1 and not self.sweeps:
            first = "first_row_block"
            blocks = self.tiling.col_blocks
            lines += [f"col_block = pid % {blocks}", f"first_row_block = pid // {blocks}"]
        lines += self.before
        if self.loops and self.body:
            blocks = self.row_blocks if self.row_blocks is not None else self._covered_blocks()
            ahead = f", num_stages={self.stages}" if self.stages > 1 and self.target != "interpreter" else ""
            span = f"{first}, {blocks}, {self.tiling.row_programs}{ahead}"
            lines.append(f"for row_block in {'tl.range' if ahead else 'range'}({span}):")
            lines += [f"    {line}" for line in self.body]
        else:
            lines += [re.sub(r"\brow_block\b", first, line) for line in self.body]
        lines += [re.sub(r"\bfirst_row_block\b", first, line) for line in self.after]
        return "\n".join(head + [f"    {line}" for line in lines])

    def _stored_values(self) -> list[int]:
        """What is computed before the first store: what is loaded, then the rest in the order of the spec.

        All of it, which is twice as fast where tiles are transposed; but wide rows only load, and compute each result
        as they store it, so that registers hold one at a time.
        """
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

    # ---- index vectors and masks --------------------------------------------------------------------------------

    def _axis(self, dim: int, step: int, across: bool = False) -> str:
        """The name of the vector of row (dim 0) or column (dim 1) numbers, in groups of `step`, of this tile.

        Rows lie along the tile's first dimension and columns along its second; `across` turns that round.
        """
        name = ("rows", "cols")[dim] + (f"_by_{step}" if step > 1 else "") + ("_t" if across else "")
        if name not in self.axes:
            self.axes.add(name)
            block = (self.tiling.block_rows, self.tiling.block_cols)[dim] // step
            shape = "[None, :]" if (dim == 1) != across else "[:, None]"
            arange = f"tl.arange(0, {block}){shape}"
            if dim == 0:
                self.body.append(f"{name} = row_block * {block} + {arange}")
            else:
                start = f"col_block * {block} + " if self.tiling.col_blocks > 1 else ""
                (self.tile if self.sweeps else self.before).append(f"{name} = {start}{arange}")
        return name

    def _mask(self, extent: Extent, across: bool = False, multiples: tuple[int, int] = (1, 1)) -> str:
        """The condition under which an element of this extent exists ("" if always), or is a zero appended to fill up
        `multiples` of rows and columns."""
        terms = []
        for dim, step in enumerate(extent):
            limit = self._limit(dim, step, multiples[dim]) if step else ""
            if limit:
                terms.append(f"({self._axis(dim, step, across)} < {limit})")
        return " & ".join(terms)

    def _limit(self, dim: int, step: int, multiple: int) -> str:
        """How many rows or columns, in groups of `step`, there are; "" if all that the tiles cover are."""
        block = (self.tiling.block_rows, self.tiling.block_cols)[dim]
        total: Size = (self.part.rows, self.part.cols)[dim]
        if isinstance(total, str):
            if all(self.part.row_divisor % n == 0 for n in (block, *(s.row_multiple for s in self.part.stores))):
                return ""
            padded = f"(tl.cdiv({total}, {multiple}) * {multiple})" if multiple > 1 else total
            return padded if step == 1 else f"tl.cdiv({padded}, {step})"
        blocks = self.row_blocks if dim == 0 else self.tiling.col_blocks
        limit = ceil_div(round_up(total, multiple), step)
        return "" if blocks is not None and limit * step == blocks * block else str(limit)

    def _index(self, axis: str, digits: Digits, wide: bool) -> list[str]:
        """Terms of Σ digit · stride for the number in vector `axis`."""
        if wide and digits:
            axis = f"{axis}.to(tl.int64)"
        terms, inner = [], []
        for n, (size, stride) in enumerate(reversed(digits)):
            outermost = n == len(digits) - 1
            if stride != 0:
                digit = axis if not inner else f"({axis} // {_product(inner)})"
                if not outermost:
                    digit = f"({digit} % {size})"
                terms.append(digit if stride == 1 else f"{digit} * {stride}")
            inner.append(size)
        return terms[::-1]

    # ---- values -------------------------------------------------------------------------------------------------

    def _value(self, i: int) -> str:
        """The name of value `i`, written where it is needed first."""
        if i not in self.done:
            line = f"v{i} = {self._text(i, self.part.values[i])}"
            self.done.add(i)
            if self.part.extents[i][1] and self.sweeps:
                self.in_tile.add(i)
            self._lines_of(i).append(line)
        return f"v{i}"

    def _lines_of(self, i: int) -> list[str]:
        """Where value `i` is computed: for each tile, for each row, or once."""
        extent = self.part.extents[i]
        if extent[1] and self.sweeps:
            return self.tile
        same_for_all_tiles = extent[0] == 0 and self.levels[i] == 0 and self.loops
        return self.before if same_for_all_tiles else self.body

    def _text(self, i: int, value: Value) -> str:
        if value.op == "constant":
            return _literal(value.params[0])
        if value.op == "load":
            return self._load(value)
        if value.op == "load_max":
            return self._load_max(value)
        if value.op == "random":
            return self._random(value)
        if value.op in ROW_REDUCTIONS:
            text, _, _, total = self._reduction(value)
            return total.format(text)
        if value.op in ("group_amax", "col_group_amax", "block_amax"):
            return self._group_reduction(value)
        if value.op == "quantize":
            return self._quantize(i, value)
        if value.op == "div" and is_normal(self.part.values, value.args[1]):
            self._use("fast_div")
            return f"fast_div({', '.join(self._operand(a, self.part.extents[i]) for a in value.args)})"
        extent = self.part.extents[i]
        expression = EXPRESSIONS[value.op]
        args = [self._operand(a, extent) for a in value.args]
        text = (self.target == "interpreter" and expression.interpreted) or expression.triton
        if expression.helper:
            helper = expression.helper.format(p0=value.params[0] if value.params else "")
            self._use(helper)
        for helper in ("_maximum", "_minimum"):
            if helper in text:
                self._use(helper)
        names = {f"p{n}": p for n, p in enumerate(value.params)}
        if value.params and value.params[0] in FORMATS:
            names["p_max"] = FORMATS[value.params[0]].max
        return text.format(*args, **names)

    def _quantize(self, i: int, value: Value) -> str:
        """The payload. Where several elements share a scale, its inverse is taken once."""
        extent = self.part.extents[i]
        x, scale = (self._operand(a, extent) for a in value.args)
        if self.part.extents[value.args[1]] == ELEMENT:
            divided = f"tl.div_rn({x}, {scale})"
        else:
            helper = "quotient_within" if is_within(self.part.values, i) else "quotient"
            self._use(helper)
            divided = f"{helper}({x}, {scale}, {self._inverse(value.args[1], extent)})"
        rows, cols = self._shape(extent)
        few = rows * cols < 4 and self.target != "interpreter"  # the packed conversion takes four at a time
        cast = f"to_{value.params[0]}{'_singly' if few else ''}"
        self._use(cast)
        return f"{cast}({divided})"

    def _inverse(self, i: int, extent: Extent) -> str:
        """1 / value `i`, repeated along its groups."""
        name = f"inverse{i}"
        lines = self._lines_of(i)
        line = f"{name} = tl.div_rn(1.0, v{i})"
        if line not in lines:
            lines.append(line)
        return self._spread(name, self.part.extents[i], extent)

    def _holds_wide_rows(self) -> bool:
        """Whether a program holds so much of whole rows that registers are what it runs out of."""
        wide = self.tiling.block_cols * sum(i.extent == ELEMENT for i in self.part.inputs) > 16384
        return any(self.levels) and wide and not self.sweeps

    def _use(self, helper: str) -> None:
        self.helpers[helper] = None

    def _operand(self, i: int, extent: Extent) -> str:
        """Value `i` repeated along groups where its own are coarser; what does not vary broadcasts by itself."""
        return self._spread(self._value(i), self.part.extents[i], extent)

    def _spread(self, text: str, have: Extent, extent: Extent) -> str:
        shape = self._shape(have)
        for dim, want in enumerate(extent):
            step = have[dim]
            if step > 1 and step != want:
                times = step // want
                inner = "[:, None, :]" if dim == 0 else "[:, :, None]"
                grown = [shape[0], times, shape[1]] if dim == 0 else [shape[0], shape[1], times]
                shape[dim] *= times
                text = f"tl.reshape(tl.broadcast_to({text}{inner}, {grown}), {shape})"
        return text

    def _shape(self, extent: Extent) -> list[int]:
        blocks = (self.tiling.block_rows, self.tiling.block_cols)
        return [blocks[d] // extent[d] if extent[d] else 1 for d in (0, 1)]

    def _load(self, value: Value) -> str:
        spec = self.part.inputs[value.params[0]]
        extent = spec.extent
        terms = [str(spec.offset)] if spec.offset else []
        for dim, digits in enumerate((spec.rows, spec.cols)):
            if extent[dim]:
                digits = digits[:-1] if extent[dim] > 1 else digits
                terms += self._index(self._axis(dim, extent[dim]), digits, self._is_wide(digits))
        mask = self._mask(extent)
        pointer = f"x{spec.tensor} + {' + '.join(terms)}" if terms else f"x{spec.tensor}"
        other = f", mask={mask}, other={'0.0' if 'float' in spec.dtype else '0'}" if mask else ""
        text = f"tl.load({pointer}{other})"
        if spec.dtype == "bool":
            return f"{text} != 0"
        return text if "int" in spec.dtype or spec.dtype == "float32" else f"{text}.to(tl.float32)"

    def _is_wide(self, digits: Digits) -> bool:
        reach = 0
        for size, stride in digits:
            if isinstance(stride, str) or (isinstance(size, str) and stride != 0):
                return True
            reach += (int(size) - 1) * stride if stride else 0
        return reach > INT32_MAX

    def _load_max(self, value: Value) -> str:
        spec = self.part.inputs[value.params[0]]
        count = int(spec.cols[0][0])
        self._use("magnitude")
        span = schedules.power_of_two(count)
        mask = f", mask=tl.arange(0, {span}) < {count}, other=0.0" if span != count else ""
        load = f"tl.load(x{spec.tensor} + tl.arange(0, {span}){mask})"
        return f"tl.max(magnitude({load}), 0).to(tl.float32, bitcast=True)"

    def _random(self, value: Value) -> str:
        rows, cols = value.params
        terms = self._index(self._axis(0, 1), rows, False) + self._index(self._axis(1, 1), cols, False)
        return f"tl.rand({self._value(value.args[0])}, ({' + '.join(terms)}).to(tl.uint32))"

    def _full(self, i: int, fill: str) -> str:
        """Value `i` over the whole tile, with `fill` beyond the last row and column."""
        text = self._operand(i, ELEMENT)
        if self.part.extents[i][1] == 0 or self.part.extents[i][0] == 0:
            text = f"tl.broadcast_to({text}, {self._shape(ELEMENT)})"
        mask = self._mask(ELEMENT)
        return f"tl.where({mask}, {text}, {fill})" if mask else text

    def _reduction(self, value: Value) -> tuple[str, str, str, str]:
        """Of a row reduction: what to reduce, its neutral element in the shape of a tile, how two tiles are joined,
        and how one is reduced along its rows. Maxima are taken of integers, which do not lose a nan."""
        i, shape = value.args[0], self._shape(ELEMENT)
        if value.op == "row_sum":
            return self._full(i, "0.0"), f"tl.zeros({shape}, tl.float32)", "{} + {}", "tl.sum({}, 1, keep_dims=True)"
        if value.op == "row_amax":
            self._use("magnitude")
            total = "tl.max({}, 1, keep_dims=True).to(tl.float32, bitcast=True)"
            return f"magnitude({self._full(i, '0.0')})", f"tl.zeros({shape}, tl.int32)", "tl.maximum({}, {})", total
        self._use("ordered")
        self._use("from_ordered")
        word, sign = ("max", "-") if value.op == "row_max" else ("min", "")
        first, last = ("0x7FFFFFFF", "-0x7FFFFFFF") if word == "max" else ("-0x7FFFFFFF", "0x7FFFFFFF")
        full = self._full(i, f'float("{sign}inf")')
        return (
            f"ordered({full}, {first})",
            f"tl.full({shape}, {last}, tl.int32)",
            f"tl.{word}imum({{}}, {{}})",
            f"from_ordered(tl.{word}({{}}, 1, keep_dims=True))",
        )

    def _group_reduction(self, value: Value) -> str:
        self._use("magnitude")
        size = value.params[0]
        rows, cols = self._shape(ELEMENT)
        bits = f"magnitude({self._full(value.args[0], '0.0')})"
        if value.op == "group_amax":
            text = f"tl.max(tl.reshape({bits}, [{rows}, {cols // size}, {size}]), 2)"
        elif value.op == "col_group_amax":
            text = f"tl.max(tl.reshape({bits}, [{rows // size}, {size}, {cols}]), 1)"
        else:
            by_cols = f"tl.max(tl.reshape({bits}, [{rows}, {cols // size}, {size}]), 2)"
            text = f"tl.max(tl.reshape({by_cols}, [{rows // size}, {size}, {cols // size}]), 1)"
        return f"{text}.to(tl.float32, bitcast=True)"

    # ---- stores -------------------------------------------------------------------------------------------------

    def _store(self, store: Store) -> None:
        value = self.part.values[store.value]
        if value.op in PARTIALS:
            self._store_partial(store, value)
            return
        extent = self.part.extents[store.value]
        dtype = self.region.buffers[store.buffer].dtype
        pointer = self._pointer(store, dtype)
        self._value(store.value)
        if extent == NUMBER:
            place = f"{pointer} + {store.offset}" if store.offset else pointer
            (self.before if self.loops else self.body).append(f"tl.store({place}, v{store.value}, mask=pid == 0)")
            return
        text, mask = self._stored(store, extent, dtype)
        index = self._store_index(store, extent)
        lines = self.tile if extent[1] else self.body
        if not extent[0]:
            mask = " & ".join(filter(None, [mask, "(row_block == 0)"]))
        elif not extent[1] and self.tiling.col_blocks > 1 and not self.sweeps:
            mask = " & ".join(filter(None, [mask, "(col_block == 0)"]))
        lines.append(f"tl.store({pointer} + {index}, {text}{f', mask={mask}' if mask else ''})")

    def _pointer(self, store: Store, dtype: str) -> str:
        name = f"y{store.buffer}"
        if not dtype.startswith("float8"):
            return name
        line = f"{name}_bytes = {name}.to(tl.pointer_type(tl.uint8), bitcast=True)"
        if line not in self.before:
            self.before.append(line)
        return f"{name}_bytes"

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
            if self._store_is_wide(store, extent):
                axis = f"{axis}.to(tl.int64)"
            terms.append(axis if store.lead == 1 else f"{axis} * {store.lead}")
        if extent[inner]:
            terms.append(self._axis(inner, extent[inner], store.transposed))
        return " + ".join(terms)

    def _store_is_wide(self, store: Store, extent: Extent) -> bool:
        if isinstance(store.lead, str) or isinstance(store.offset, str):
            return True
        total = (self.rows_covered, self.cols_covered)[1 if store.transposed else 0]
        return isinstance(total, str) or total * store.lead + store.offset > INT32_MAX

    def _store_partial(self, store: Store, value: Value) -> None:
        """Accumulate over the tiles of this program, and store one result."""
        i = value.args[0]
        name = f"acc{store.value}"
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
        if self.loops or (self.sweeps and extent[1]):
            zero = f"tl.zeros({shape}, tl.{'float32' if is_sum else 'int32'})"
            self.before.append(f"{name} = {zero}")
            lines = self.tile if extent[1] else self.body
            lines.append(f"{name} += {text}" if is_sum else f"{name} = tl.maximum({name}, {text})")
        else:
            self.body.append(f"{name} = {text}")
        cast = "" if is_sum else ".to(tl.float32, bitcast=True)"
        if value.op == "all_amax":
            largest = f"tl.max(tl.reshape({name}, [{shape[0] * shape[1]}]), 0)"
            self.after.append(f"tl.store(y{store.buffer} + pid, {largest}{cast})")
            return
        total = f"tl.{'sum' if is_sum else 'max'}({name}, 0, keep_dims=True){cast}"
        mask = self._mask(COLUMN)
        self.after.append(
            f"tl.store(y{store.buffer} + first_row_block * {self.part.cols} + {self._axis(1, 1)}, {total}"
            f"{f', mask={mask}' if mask else ''})"
        )


def _product(sizes: list[Size]) -> str:
    known = 1
    names = []
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            names.append(size)
    text = " * ".join([*names, *([str(known)] if known > 1 or not names else [])])
    return f"({text})" if " " in text else text


def _literal(x: float | bool) -> str:
    if isinstance(x, bool):
        return str(x)
    if x != x or x in (float("inf"), float("-inf")):
        return f'float("{x}")'
    return repr(float(x))


def _by_number(name: str) -> tuple[str, int]:
    return name[0], int(name[1:])
