"""The values of a part: each written once, where it is needed first.

What is the same for all tiles stands before the walk over them. Operations are written as their rows in
`kernels/codegen/spec/operations.py` have it, reductions along rows as in `kernels/codegen/spec/reductions.py`;
reductions along groups, and casts to FP8, are written here.
"""

from __future__ import annotations

from fp8compile.kernels.codegen.emit.indices import Indices
from fp8compile.kernels.codegen.emit.loads import literal, load, load_max, random_counter
from fp8compile.kernels.codegen.schedule.tile_layout import TileLayout
from fp8compile.kernels.codegen.source.function_draft import FunctionDraft
from fp8compile.kernels.codegen.source.statements import Assign, Expression, Name, Statement, expr
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.ranges import is_normal, is_power_of_two, is_within, ranges_of
from fp8compile.kernels.codegen.spec.reductions import REDUCTIONS, TO_FLOAT, RowReduction
from fp8compile.kernels.codegen.spec.region import ELEMENT, GROUP_REDUCTIONS, ROW_REDUCTIONS, Extent, Value


class Values:
    """Writes the values of one part.

    done: values that stand in the source; in_tile: of these, the ones that the current sweep computed.
    """

    def __init__(self, layout: TileLayout, draft: FunctionDraft, indices: Indices, target: str) -> None:
        self.layout, self.draft, self.indices, self.target = layout, draft, indices, target
        self.part = layout.part
        self.ranges = ranges_of(layout.part.values)
        self.done: set[int] = set()
        self.in_tile: set[int] = set()

    def value(self, i: int) -> Name:
        """Return the variable of value `i`, which is written here if it is needed for the first time."""
        name = Name(f"v{i}")
        if i not in self.done:
            assign = Assign(name, self._computed(i, self.part.values[i]))
            if self.part.extents[i][1] and self.layout.tiling.sweeps:
                self.in_tile.add(i)
            self.define(i, assign)
        return name

    def define(self, i: int, assign: Assign, statements: list[Statement] | None = None) -> None:
        """Have value `i` computed by `assign`, in its own place or among `statements`."""
        self.done.add(i)
        (self._statements_of(i) if statements is None else statements).append(assign)

    def _statements_of(self, i: int) -> list[Statement]:
        """Return where value `i` is computed: for each tile, for each row, or once."""
        extent, layout, draft = self.part.extents[i], self.layout, self.draft
        if layout.is_interleaved(i) or (extent[1] and layout.tiling.owns_rows):
            return draft.tile
        same_for_all_tiles = extent[0] == 0 and self.part.levels[i] == 0 and layout.loops
        same_for_all_tiles |= 0 < layout.loaded_once_for(i) == layout.band_rows
        return draft.before if same_for_all_tiles else draft.body

    def _computed(self, i: int, value: Value) -> Expression:
        if value.op == "constant":
            return literal(value.params[0])
        if value.op == "load":
            return load(self.layout, self.indices, i)
        if value.op == "load_max":
            return load_max(self.part.inputs[value.params[0]], self.draft)
        if value.op == "random":
            counter = random_counter(self.indices, *value.params)
            return expr("tl.rand({}, {})", self.value(value.args[0]), counter)
        if value.op in ROW_REDUCTIONS:
            reduction, element = self.reduced(value)
            return expr(reduction.total, element)
        if value.op in GROUP_REDUCTIONS:
            return self._group_amax(value)
        if value.op == "quantize":
            return self._quantized(i, value)
        if value.op == "div" and is_normal(self.ranges[value.args[1]]):
            return self._fast_quotient(i, value)
        return self._operation(value, self.part.extents[i])

    def _operation(self, value: Value, extent: Extent) -> Expression:
        operation = OPERATIONS[value.op]
        args = [self.operand(a, extent) for a in value.args]
        for helper in operation.helpers(self.target):
            self.draft.use(helper)
        return expr(operation.text(self.target, value.params), *args)

    def _fast_quotient(self, i: int, value: Value) -> Expression:
        """Return a quotient of which nothing is subnormal; where 1 is divided, the inverse."""
        extent = self.part.extents[i]
        numerator = self.part.values[value.args[0]]
        if numerator.op == "constant" and numerator.params[0] == 1.0:
            self.draft.use("fast_inverse")
            return expr("fast_inverse({})", self.operand(value.args[1], extent))
        self.draft.use("fast_div")
        return expr("fast_div({}, {})", *(self.operand(a, extent) for a in value.args))

    # ---- casts --------------------------------------------------------------------------------------------------

    def _quantized(self, i: int, value: Value) -> Expression:
        """Return the payload; of every fourth row what is to be cast, as codes of four rows are made together."""
        if self.layout.is_interleaved(i):
            return self._divided(i, value)
        rows, cols = self.layout.shape(self.part.extents[i])
        few = rows * cols < 4 and self.target != "interpreter"  # the packed conversion takes four at a time
        cast = f"to_{value.params[0]}{'_singly' if few else ''}"
        self.draft.use(cast)
        return expr(f"{cast}({{}})", self._divided(i, value))

    def _divided(self, i: int, value: Value) -> Expression:
        """Return what is to be cast, divided by its scale. Where elements share one, its inverse is taken once."""
        extent = self.part.extents[i]
        x, scale = (self.operand(a, extent) for a in value.args)
        if self.part.extents[value.args[1]] == ELEMENT:
            return expr("tl.div_rn({}, {})", x, scale)
        if is_power_of_two(self.part.values, value.args[1]):
            return expr("{} * {}", x, self._inverse(value.args[1], extent))
        helper = "quotient_within" if is_within(self.part.values, i) else "quotient"
        self.draft.use(helper)
        return expr(f"{helper}({{}}, {{}}, {{}})", x, scale, self._inverse(value.args[1], extent))

    def _inverse(self, i: int, extent: Extent) -> Expression:
        """Return 1 / value `i`, repeated along its groups."""
        name = Name(f"inverse{i}")
        self.draft.use("inverse_of")
        self.draft.add_once(self._statements_of(i), Assign(name, expr("inverse_of({})", Name(f"v{i}"))))
        return self._spread(name, self.part.extents[i], extent)

    # ---- operands -----------------------------------------------------------------------------------------------

    def operand(self, i: int, extent: Extent) -> Expression:
        """Return value `i`, repeated along groups where its own are coarser; one that does not vary is broadcast."""
        return self._spread(self.value(i), self.part.extents[i], extent)

    def full(self, i: int, fill: str) -> Expression:
        """Return value `i` over the whole tile, with `fill` beyond the last row and column."""
        x = self.operand(i, ELEMENT)
        if self.part.extents[i][1] == 0 or self.part.extents[i][0] == 0:
            x = expr("tl.broadcast_to({}, {})", x, str(self.layout.shape(ELEMENT)))
        mask = self.indices.mask(ELEMENT)
        return expr("tl.where({}, {}, {})", mask, x, fill) if mask else x

    def _spread(self, x: Expression, have: Extent, extent: Extent) -> Expression:
        shape = self.layout.shape(have)
        for dim, want in enumerate(extent):
            step = have[dim]
            if step > 1 and step != want:
                times = step // max(want, self.layout.steps[dim])
                inner = "[:, None, :]" if dim == 0 else "[:, :, None]"
                grown = [shape[0], times, shape[1]] if dim == 0 else [shape[0], shape[1], times]
                shape[dim] *= times
                x = expr(f"tl.reshape(tl.broadcast_to({{}}{inner}, {grown}), {shape})", x)
        return x

    # ---- reductions ---------------------------------------------------------------------------------------------

    def reduced(self, value: Value) -> tuple[RowReduction, Expression]:
        """Return how rows are reduced to `value`, and the elements of a tile of which it is."""
        reduction = REDUCTIONS[value.op]
        for helper in reduction.helpers:
            self.draft.use(helper)
        return reduction, expr(reduction.element, self.full(value.args[0], reduction.fill))

    def magnitudes(self, i: int) -> Expression:
        """Return the magnitudes of value `i` over the whole tile, as integers."""
        self.draft.use("magnitude")
        return expr("magnitude({})", self.full(i, "0.0"))

    def _group_amax(self, value: Value) -> Expression:
        size = value.params[0]
        shape = self.layout.shape(ELEMENT)
        x = self.magnitudes(value.args[0])
        down, across = (size if grouped else 1 for grouped in GROUP_REDUCTIONS[value.op])
        return expr(f"{{}}{TO_FLOAT}", max_of_groups(x, shape, down, across))


def max_of_groups(x: Expression, shape: list[int], down: int, across: int) -> Expression:
    """Return the maxima of groups of `down` rows and `across` columns of x [rows, cols] of this shape."""
    rows, cols = shape
    if across > 1:
        cols //= across
        x = expr(f"tl.max(tl.reshape({{}}, [{rows}, {cols}, {across}]), 2)", x)
    return expr(f"tl.max(tl.reshape({{}}, [{rows // down}, {down}, {cols}]), 1)", x) if down > 1 else x
