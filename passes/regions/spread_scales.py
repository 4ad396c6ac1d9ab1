"""Spread scales: a cast by one scale also writes that scale for each row, where a matmul wants it so.

Before      %q, %t = region(%w)          %y = scaled_mm(%p, %s, row, %q, %t, tensor, …)
After       %q, %t, %r = region(%w)      %y = scaled_mm(%p, %s, row, %q, %r, row, …)        %r[n] = %t

Libraries multiply two operands by rows, or two by one scale each. For an activation by rows and a weight by one scale
`call_matmuls` would repeat the scale of the weight, by a launch for each matmul. Sound, as each row has the same scale.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.formats import ALIGNMENT
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.kernels.codegen.spec.region import NUMBER, Buffer, Part, Region, Store
from fp8compile.passes.core.compilation import getitems, value
from fp8compile.passes.core.fusible import RESHAPES
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.node_views import Getitem, first_input
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, rewrite, spec_of, tensors_of

A, B = 0, 3  # positions of an operand among the arguments of a matmul; its scale and their granularity follow


def spread_scales(editor: GraphEditor) -> None:
    """Let regions write scales by rows, for matmuls whose other operand has such scales."""
    for node in editor.graph.find_nodes(op="call_function", target=ops.scaled_mm):
        mm = ScaledMM(node)
        granularities = {A: mm.granularity_a, B: mm.granularity_b}
        if set(granularities.values()) == {"tensor", "row"} and mm.offs is None:
            at = next(at for at, granularity in granularities.items() if granularity == "tensor")
            spread = _spread(editor, node.args[at], node.args[at + 1])
            if spread is not None:
                node.update_arg(at + 1, spread)
                node.update_arg(at + 2, "row")


def _spread(editor: GraphEditor, payload: Any, scale: Any) -> fx.Node | None:
    """Return the scale of `payload` for each of its rows, from the region that casts it; None if that cannot be."""
    while scale.target in RESHAPES:
        scale = first_input(scale)
    if not is_from_region(payload) or not is_from_region(scale) or value(payload).dim() != 2:
        return None
    node, rows = Getitem(payload).source, value(payload).shape[0]
    if Getitem(scale).source is not node or not isinstance(rows, int):
        return None
    region, _ = spec_of(node)
    if is_one_pass(region):  # its scale is known when the cast has been made
        return None
    parts = _parts(region, Getitem(payload).index, Getitem(scale).index, rows)
    if parts is None:
        return None
    buffers = *region.buffers, Buffer((rows, 1), "float32")
    known = _known(region, parts)
    if known is None:
        rewrite(node, tensors_of(node), replace(region, parts=parts, buffers=buffers))
        editor.refresh(node)
        known = len(region.buffers)
    return getitems(node).get(known) or editor.emit(operator.getitem, node, known, before=node.next, like=payload)


def _parts(region: Region, payload: int, scale: int, rows: int) -> tuple[Part, ...] | None:
    """Return the parts, with a store more in each that casts rows of a payload; None unless these are all of its rows,
    cast by the number that is stored as its scale."""
    parts, found, expressions = list(region.parts), 0, set[Any]()
    for n, part in enumerate(region.parts):
        expressions |= {_expression(part, s.value) for s in part.stores if s.buffer == scale}
        for store in (s for s in part.stores if s.buffer == payload):
            cast = part.values[store.value]
            is_plain = not any(s.transposed for s in part.stores) and store.lead == part.cols
            if cast.op != "quantize" or not is_plain or part.extents[cast.args[1]] != NUMBER:
                return None
            if not isinstance(part.rows, int) or part.rows % ALIGNMENT or not isinstance(store.offset, int):
                return None
            expressions.add(_expression(part, cast.args[1]))
            # A number is stored once; with a multiple of rows, which they are already, it is stored for each of them.
            first, found = store.offset // part.cols, found + part.rows
            more = Store(len(region.buffers), cast.args[1], offset=first, row_multiple=ALIGNMENT)
            parts[n] = replace(parts[n], stores=(*parts[n].stores, more))  # a part may cast several pieces
    return tuple(parts) if found == rows and len(expressions) == 1 else None


def _known(region: Region, parts: tuple[Part, ...]) -> int | None:
    """Return the buffer that a region has for these stores already; None if it has none."""
    new = [{replace(s, buffer=0) for s in p.stores if s.buffer == len(region.buffers)} for p in parts]
    for n in range(len(region.buffers)):
        if [{replace(s, buffer=0) for s in p.stores if s.buffer == n} for p in region.parts] == new:
            return n
    return None


def _expression(part: Part, number: int) -> Any:
    """Return how a value is computed, of which tensors: equal for equal numbers."""
    x = part.values[number]
    if x.op in ("load", "load_max"):
        return x.op, part.inputs[x.params[0]]
    return x.op, x.params, tuple(_expression(part, a) for a in x.args)
