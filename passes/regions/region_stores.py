"""Where the values of a region go: the store and the buffer of each node that it computes for others."""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.spec.region import Buffer, Store
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.iteration import contiguous, divides, same
from fp8compile.passes.core.marker_views import Quantize, is_amax_of_tensor
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.regions.build_region import Builder, Sink
from fp8compile.passes.regions.cast_layout import CastLayout
from fp8compile.passes.regions.clusters import is_value
from fp8compile.passes.regions.part_values import RefusedError


def sink_of(builder: Builder, node: fx.Node) -> Sink:
    """Return the store of a cluster's own sink."""
    if node.target is ops.quantize:
        return _payload(builder, node)
    if is_value(node):
        return store_value(builder, node)
    source = first_input(node)
    if fusible.is_col_sum(node):
        bands = fusible.bands_of(node)
        others = {v.params for v in builder.values.items if v.op == "col_sum" and v.params}
        if bands > 1 and others - {(bands,)}:
            raise RefusedError("it sums other bands of rows than another sum of this kernel")
        summed = builder.evaluate(source, builder.everything)
        i = builder.values.op("col_sum", summed, params=(bands,) if bands > 1 else ())
        return Sink(node, Store(0, i), Buffer(("row_programs0", builder.cols), "float32"))
    if is_amax_of_tensor(node):
        if source.target is ops.amax:
            stats = builder.stat_access(first_input(source), CastLayout.of(source))
            i = builder.values.op("all_amax", builder.evaluate(source, stats))
        else:
            i = builder.values.op("all_amax", builder.cast_source(node))
        return Sink(node, Store(0, i), Buffer(("programs0",), "float32"))
    i = builder.values.op("col_amax", builder.cast_source(node))
    return Sink(node, Store(0, i), Buffer(("row_programs0", builder.cols), "float32"))


def _payload(builder: Builder, node: fx.Node) -> Sink:
    cast = Quantize(node)
    layout = CastLayout.of(node)
    x = builder.values.stored(builder.cast_source(node))
    s = builder.evaluate(cast.scale, builder.stat_access(cast.x, layout))
    i = builder.values.op("quantize", x, s, params=(cast.format,))
    rows, cols = builder.values.number(builder.rows), builder.cols
    across, down = layout.col_multiple, layout.row_multiple
    if layout.transpose:
        across, down = down, across
    _refuse_matrices_that_are_padded(cast.x, down)
    padded_rows = (rows, down) if down > 1 else rows
    padded_cols = -(-cols // across) * across
    if layout.transpose:
        lead = _padded(builder, down)
        store, shape = Store(0, i, lead, 0, True, down, across), (padded_cols, padded_rows)
    else:
        store, shape = Store(0, i, padded_cols, 0, False, down, across), (padded_rows, padded_cols)
    return Sink(node, store, Buffer(shape, str(value(node).dtype).removeprefix("torch.")))


def _refuse_matrices_that_are_padded(x: fx.Node, multiple: int) -> None:
    """Raise `RefusedError` where each matrix of a batch gets rows of zeros: a store has them behind all rows alone."""
    *batch, rows, _ = value(x).shape
    if multiple > 1 and not all(same(n, 1) for n in batch) and not divides(multiple, rows):
        raise RefusedError("it pads the rows of each matrix of a batch")


def _padded(builder: Builder, multiple: int) -> Any:
    """Return rows rounded up, as a size that the kernel is given."""
    rows = builder.rows if multiple == 1 else -(-builder.rows // multiple) * multiple
    return builder.values.number(rows)


def store_value(builder: Builder, node: fx.Node) -> Sink:
    """Return the store of a value on the way that others need."""
    x = value(node)
    buffer = Buffer(tuple(map(builder.values.number, x.shape)), str(x.dtype).removeprefix("torch."))
    if not all(same(a, b) or same(n, 1) for a, b, n in zip(x.stride(), contiguous(x.shape), x.shape, strict=True)):
        raise RefusedError("its strides are not row-major")
    if node.target in (ops.amax, ops.scale):
        return _statistic(builder, node)
    total = fusible.elements(node)
    if same(total, builder.rows * builder.cols):
        i = builder.values.stored(builder.evaluate(node, builder.everything))
        return Sink(node, Store(0, i, builder.cols), buffer)
    if same(total, builder.rows):
        i = builder.values.stored(builder.evaluate(node, builder.each_row), cols=1)
        return Sink(node, Store(0, i), buffer)
    raise RefusedError("it is neither of the region's size nor of its rows")


def _statistic(builder: Builder, node: fx.Node) -> Sink:
    """Return the store of an amax or a scale, in the shape that its marker has."""
    marker = node
    while marker.target in (ops.scale, aten.maximum.default):  # one scale for all parts of a concatenation
        marker = marker.all_input_nodes[0]
    if value(node).dim() == 0:
        i = builder.evaluate(node, ())
        return Sink(node, Store(0, i), Buffer((1,), "float32"))  # Inductor fills what has no dimensions
    if marker.target is not ops.amax:
        raise RefusedError("the scale of something else")
    layout = CastLayout.of(marker)
    i = builder.evaluate(node, builder.stat_access(first_input(marker), layout))
    kind, size = layout.granularity.kind, layout.granularity.size
    rows, cols = builder.values.number(builder.rows), builder.cols
    if kind == "row":
        if layout.transpose:
            raise RefusedError("a scale of columns")
        down = layout.row_multiple
        _refuse_matrices_that_are_padded(first_input(marker), down)
        return Sink(node, Store(0, i, 1, 0, False, down), Buffer(((rows, down) if down > 1 else rows, 1), "float32"))
    if (layout.row_multiple, layout.col_multiple) != (1, 1):
        raise RefusedError("scales of groups with padding")
    groups = cols // size
    if kind == "group" and not layout.transpose:
        return Sink(node, Store(0, i, groups), Buffer((rows, groups), "float32"))
    if not isinstance(rows, int):
        raise RefusedError("scales of groups of symbolic rows")
    if kind == "group":
        return Sink(node, Store(0, i, rows // size, 0, True), Buffer((cols, rows // size), "float32"))
    if layout.transpose:
        return Sink(node, Store(0, i, rows // size, 0, True), Buffer((groups, rows // size), "float32"))
    return Sink(node, Store(0, i, groups), Buffer((rows // size, groups), "float32"))
