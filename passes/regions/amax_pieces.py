"""Amaxes in pieces: what programs left is put together by the region that reads it, or by a region of its own.

Before      %a = amax(%pieces, "tensor")   %s = scale(%a)   %q = region(%x, %s)
After       %q = region(%x, %pieces)                        each program reads all pieces, if they are few

So a kernel needs no atomics and no buffer that is cleared before, and gives the same bits each time.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.core.compilation import value
from fp8compile.passes.core.marker_views import Amax, Scale
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, regions_of, rewrite, spec_of, tensors_of

FEW = 1024  # pieces of an amax that each program of the next kernel may read


def _pieces(node: fx.Node) -> fx.Node | None:
    """Return the pieces that `node` is the maximum of, if they are a region's."""
    amax = Amax.of(node)
    return amax.x if amax and amax.granularity == "tensor" and is_from_region(amax.x) else None


def read_pieces(graph: fx.Graph) -> None:
    """Let regions read the pieces of an amax instead of waiting for a kernel that puts them together."""
    for node in regions_of(graph):
        known = tensors_of(node)
        tensors, (region, _) = list(known), spec_of(node)
        changed = False
        for t, tensor in enumerate(tensors):
            pieces = _pieces(tensor)
            if pieces is not None and value(pieces).numel() <= FEW:
                tensors[t] = pieces
                region = _reading_pieces(region, t, value(pieces).numel())
                changed = True
        if changed:
            read = zip(tensors, known, region.strides, strict=True)
            strides = tuple((1,) if a is not b else s for a, b, s in read)
            rewrite(node, tensors, replace(region, strides=strides))


def _reading_pieces(region: Region, tensor: int, count: int) -> Region:
    parts = []
    for part in region.parts:
        inputs, values = list(part.inputs), list(part.values)
        for n, i in enumerate(part.inputs):
            if i.tensor == tensor:
                inputs[n] = Input(tensor, "float32", (), ((count, 1),))
                values = [Value("load_max", (), v.params) if v == Value("load", (), (n,)) else v for v in values]
        parts.append(replace(part, inputs=tuple(inputs), values=tuple(values)))
    return replace(region, parts=tuple(parts))


def finish_amaxes(editor: GraphEditor) -> None:
    """Put together by a region each what is left in pieces, with the scale that is made of it."""
    for node in list(editor.graph.find_nodes(op="call_function", target=ops.amax)):
        pieces = _pieces(node)
        if pieces is None or not node.users:
            continue
        count = value(pieces).numel()
        values = [Value("load", (), (0,)), Value("row_amax", (0,))]
        made, users = [], []
        for scale in [s for u in node.users if (s := Scale.of(u)) and not s.is_delayed]:
            values.append(Value("scale_power_of_two" if scale.power_of_two else "scale", (1,), (scale.format,)))
            made.append(scale.node)
            users.append(list(scale.node.users))
        stores = [Store(n, n + 2) for n in range(len(made))]
        others = [u for u in node.users if u not in made]
        if others:
            stores.append(Store(len(made), 1))
            made.append(node)
            users.append(others)
        part = Part(1, count, (Input(0, "float32", (), ((count, 1),)),), tuple(values), tuple(stores))
        region = Region((part,), tuple(Buffer((1,), "float32") for _ in made), (), ((1,),))
        editor.insert(region, [pieces], [], made, users, pieces=False)
