"""The values of a part that are made of nothing it computes: what is loaded, constants, random numbers."""

from __future__ import annotations

from fp8compile.kernels.codegen.emit.indices import BAND, ROW_BLOCK, Indices, address_terms, index_terms
from fp8compile.kernels.codegen.schedule.tile_layout import TileLayout
from fp8compile.kernels.codegen.schedule.tiling import power_of_two
from fp8compile.kernels.codegen.source.function_draft import FunctionDraft
from fp8compile.kernels.codegen.source.statements import Apply, Expression, Name, expr, joined
from fp8compile.kernels.codegen.spec.reductions import TO_FLOAT
from fp8compile.kernels.codegen.spec.region import Digits, Input


def literal(x: float | bool) -> Apply:
    """Return a number as source."""
    if isinstance(x, bool):
        return expr(str(x))
    if x != x or x in (float("inf"), float("-inf")):
        return expr(f'float("{x}")')
    return expr(repr(float(x)))


def load(layout: TileLayout, indices: Indices, i: int) -> Expression:
    """Return value `i`, a load, as FP32, bool or integers."""
    spec = layout.part.inputs[layout.part.values[i].params[0]]
    alike = layout.loaded_once_for(i)
    extent = (0, spec.extent[1]) if alike else spec.extent
    pointer = joined(" + ", [indices.argument(spec), *_offset_terms(layout, indices, spec, alike)])
    mask = indices.mask(extent)
    if mask:
        x = expr("tl.load({}, mask={}, other={})", pointer, mask, "0.0" if "float" in spec.dtype else "0")
    else:
        x = expr("tl.load({})", pointer)
    if spec.dtype == "bool":
        x = expr("{} != 0", x)
    elif "int" not in spec.dtype and spec.dtype != "float32":
        x = expr("{}.to(tl.float32)", x)
    return expr("tl.broadcast_to({}, {})", x, str(layout.shape(spec.extent))) if alike else x


def _offset_terms(layout: TileLayout, indices: Indices, spec: Input, alike: int) -> list[Expression]:
    """Return the terms of the offsets at which the elements of a tile lie; `alike` rows read the same."""
    terms: list[Expression] = [expr(str(spec.offset))] if spec.offset else []
    for dim, digits in enumerate((spec.rows, spec.cols)):
        if not spec.extent[dim]:
            continue
        if alike and dim == 0:
            axis = expr("({} * {})", BAND if alike == layout.band_rows else ROW_BLOCK, alike)
        else:
            axis = indices.columns_of(spec) if dim and spec.beside else indices.vector(dim, spec.extent[dim])
        terms += address_terms(axis, digits[:-1] if spec.extent[dim] > 1 else digits)
    return terms


def load_max(spec: Input, draft: FunctionDraft) -> Expression:
    """Return the maximum of all that an input has, which are magnitudes."""
    draft.use("magnitude")
    count = int(spec.cols[0][0])
    span = power_of_two(count)
    mask = f", mask=tl.arange(0, {span}) < {count}, other=0.0" if span != count else ""
    x = expr(f"tl.load({{}} + tl.arange(0, {span}){mask})", Name(f"x{spec.tensor}"))
    return expr(f"tl.max(magnitude({{}}), 0){TO_FLOAT}", x)


def random_counter(indices: Indices, rows: Digits, cols: Digits) -> Expression:
    """Return the position of each element, of which its random number is a function: digits of its row and column."""
    terms = index_terms(indices.vector(0, 1), rows) + index_terms(indices.vector(1, 1), cols)
    return expr("({}).to(tl.uint32)", joined(" + ", terms))
