"""Column sums in pieces: what programs left is added up by a region, in the dtype in which it is wanted.

Before      %p = getitem(%r, 2)   %s = sum(%p, [0])   %t = convert(%s, bf16)      one or two kernels of Inductor's each
After       %p = getitem(%r, 2)   %t = getitem(region(%p), 0)                     one; those that leave the graph share

A sum over the programs is a sum of rows of the transposed pieces: (columns, programs), strided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Sum
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.node_views import Getitem, first_input
from fp8compile.passes.regions.region_graph import GraphEditor, is_from_region, spec_of

MOST = 2048  # pieces of a sum that one program may hold
HALVES = (torch.bfloat16, torch.float16)
ADDED = (Value("load", (), (0,)), Value("row_sum", (0,)))


def finish_sums(editor: GraphEditor) -> None:
    """Add up by a region each what column sums left in pieces; views and a cast behind it are of its result."""
    for node in list(editor.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        pieces = _pieces(node)
        if pieces is None:
            continue
        shape = value(first_input(node)).shape
        if not 1 < shape[-2] <= MOST:
            continue
        *_, last = _behind(node)
        if not last.users:
            continue
        origins = spec_of(Getitem(pieces).source)[0].origins
        editor.insert(sum_of(shape, value(last).dtype, origins), [pieces], [], [last], [list(last.users)], pieces=False)


def sum_of(shape: Sequence[int], dtype: torch.dtype, origins: tuple[str, ...] = ()) -> Region:
    """Return the region that adds up FP32 pieces (programs, columns), or (bands, programs, columns) seen so, over
    programs."""
    *bands, programs, columns = shape
    rows = (*((n, programs * columns) for n in bands), (columns, 1))
    part = Part(
        rows=math.prod(bands) * columns,
        cols=programs,
        inputs=(Input(0, "float32", rows, ((programs, columns),)),),
        values=ADDED,
        stores=(Store(0, 1),),
    )
    return Region((part,), (Buffer((part.rows,), str(dtype).removeprefix("torch.")),), origins, ((columns, 1),))


def adds_pieces(region: Region) -> bool:
    """Return True if a region is of such sums alone."""
    return all(part.values == ADDED and part.inputs[0].cols[0][1] != 1 for part in region.parts)


def _pieces(node: fx.Node) -> fx.Node | None:
    """Return the pieces that `node` adds up: a region's, (programs, columns), or seen as (bands, programs, columns)."""
    sums = Sum(node)
    in_bands = sums.x.target is aten.view.default
    if sums.dims != [int(in_bands)] or sums.keeps_dims or sums.dtype is not None:
        return None
    found = first_input(sums.x) if in_bands else sums.x
    if not is_from_region(found):
        return None
    item = Getitem(found)
    region, _ = spec_of(item.source)
    first = region.buffers[item.index].shape[0]
    return found if str(first).startswith("row_programs") else None


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node`, and what alone reads it and only changes its shape, or once its dtype to one that a region
    stores."""
    yield node
    while len(node.users) == 1:
        (user,) = node.users
        halved = user.target is fusible.prims.convert_element_type.default and value(user).dtype in HALVES
        same = user.target in fusible.RESHAPES and value(user).is_contiguous()
        if not (same or (halved and value(node).dtype == torch.float32)):
            return
        node = user
        yield node
