"""The values of a part as Triton source: each written once, where it is needed first.

What is the same for all tiles stands before the walk over them; reductions along rows and groups, and casts to FP8, are
written here, every other operation as its row in `kernels/codegen/expressions.py` has it.
"""

from __future__ import annotations

from fp8compile.formats import FORMATS
from fp8compile.kernels.codegen import schedule as schedules
from fp8compile.kernels.codegen.emit_tile import Tile
from fp8compile.kernels.codegen.expressions import EXPRESSIONS
from fp8compile.kernels.codegen.ranges import is_normal, is_within
from fp8compile.kernels.codegen.spec import ELEMENT, ROW_REDUCTIONS, Extent, Value


class Values(Tile):
    """Writes the values of one part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.levels = self.part.levels
        self.done: set[int] = set()  # values that stand in the source
        self.in_tile: set[int] = set()  # of these, the ones that the current sweep computed

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
        if extent[1] and self.owns_rows:
            return self.tile
        same_for_all_tiles = extent[0] == 0 and self.levels[i] == 0 and self.loops
        same_for_all_tiles |= 0 < self._loaded_once_for(i) == self.band_rows
        return self.before if same_for_all_tiles else self.body

    def _loaded_once_for(self, i: int) -> int:
        """For how many rows value `i` is loaded once: those of a band, or of a tile; 0 if it is loaded for each."""
        value = self.part.values[i]
        return self._alike(self.part.inputs[value.params[0]]) if value.op == "load" else 0

    def _text(self, i: int, value: Value) -> str:
        if value.op == "constant":
            return _literal(value.params[0])
        if value.op == "load":
            return self._load(i, value)
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
        """The payload."""
        rows, cols = self._shape(self.part.extents[i])
        few = rows * cols < 4 and self.target != "interpreter"  # the packed conversion takes four at a time
        cast = f"to_{value.params[0]}{'_singly' if few else ''}"
        self._use(cast)
        return f"{cast}({self._divided(i, value)})"

    def _divided(self, i: int, value: Value) -> str:
        """What is to be cast, divided by its scale. Where several elements share one, its inverse is taken once."""
        extent = self.part.extents[i]
        x, scale = (self._operand(a, extent) for a in value.args)
        if self.part.extents[value.args[1]] == ELEMENT:
            return f"tl.div_rn({x}, {scale})"
        helper = "quotient_within" if is_within(self.part.values, i) else "quotient"
        self._use(helper)
        return f"{helper}({x}, {scale}, {self._inverse(value.args[1], extent)})"

    def _inverse(self, i: int, extent: Extent) -> str:
        """1 / value `i`, repeated along its groups."""
        name = f"inverse{i}"
        lines = self._lines_of(i)
        self._use("inverse_of")
        line = f"{name} = inverse_of(v{i})"
        if line not in lines:
            lines.append(line)
        return self._spread(name, self.part.extents[i], extent)

    def _holds_wide_rows(self) -> bool:
        """Whether a program holds so much of whole rows that registers are what it runs out of."""
        held = self.tiling.block_cols * (self.tiling.col_blocks if self.tiling.held else 1)
        wide = held * sum(i.extent == ELEMENT for i in self.part.inputs) > 16384
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
                times = step // max(want, self.steps[dim])
                inner = "[:, None, :]" if dim == 0 else "[:, :, None]"
                grown = [shape[0], times, shape[1]] if dim == 0 else [shape[0], shape[1], times]
                shape[dim] *= times
                text = f"tl.reshape(tl.broadcast_to({text}{inner}, {grown}), {shape})"
        return text

    def _load(self, i: int, value: Value) -> str:
        spec = self.part.inputs[value.params[0]]
        extent = spec.extent
        alike = self._loaded_once_for(i)
        first_row = f"({'band' if alike == self.band_rows else 'row_block'} * {alike})"
        terms = [str(spec.offset)] if spec.offset else []
        for dim, digits in enumerate((spec.rows, spec.cols)):
            if extent[dim]:
                axis = first_row if alike and dim == 0 else self._axis(dim, extent[dim])
                digits = digits[:-1] if extent[dim] > 1 else digits
                terms += self._index(axis, digits, self._is_wide(digits))
        mask = self._mask((0, extent[1]) if alike else extent)
        pointer = f"x{spec.tensor} + {' + '.join(terms)}" if terms else f"x{spec.tensor}"
        other = f", mask={mask}, other={'0.0' if 'float' in spec.dtype else '0'}" if mask else ""
        text = f"tl.load({pointer}{other})"
        if spec.dtype == "bool":
            text = f"{text} != 0"
        elif "int" not in spec.dtype and spec.dtype != "float32":
            text = f"{text}.to(tl.float32)"
        return f"tl.broadcast_to({text}, {self._shape(extent)})" if alike else text

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
        text = bits
        if value.op in ("group_amax", "block_amax"):
            text = max_of_groups(text, rows, cols, 1, size)
            cols //= size
        if value.op in ("col_group_amax", "block_amax"):
            text = max_of_groups(text, rows, cols, 0, size)
        return f"{text}.to(tl.float32, bitcast=True)"


def max_of_groups(x: str, rows: int, cols: int, dim: int, size: int) -> str:
    """The maxima of each `size` of x [rows, cols] along `dim`."""
    if dim == 1:
        return f"tl.max(tl.reshape({x}, [{rows}, {cols // size}, {size}]), 2)"
    return f"tl.max(tl.reshape({x}, [{rows // size}, {size}, {cols}]), 1)"


def _literal(x: float | bool) -> str:
    if isinstance(x, bool):
        return str(x)
    if x != x or x in (float("inf"), float("-inf")):
        return f'float("{x}")'
    return repr(float(x))
