"""Exchange as FP8: rows that experts get from other ranks, and give back, are cast before they travel.

Before      %y = all_to_all(%x)   %q = fp8.quantize(%y, %s, e4m3, row)   %d = fp8.grouped_cast(%y, …)
After       %q = fp8.quantize(%x, …)   %y = all_to_all(%q)               %d = fp8.grouped_cast(fp8.dequantize(%y, …), …)

Where only FP8 matmuls read the rows (in inference, or with frozen experts) they get the same values, bit for bit
(`passes/collectives/quantize_before_collective.py`). Elsewhere it takes wire="fp8", for somebody reads rounded rows:
grad_weight of experts, which casts them by columns, or, behind the experts, the model. A row with a scale of its own
loses what a cast for a matmul would.

All ranks must decide alike, and each compiles its own graph. Where a graph knows how many rows its rank sends and gets,
others may get other numbers, and have a matmul in BF16 for their few rows: there nothing is cast for its readers, and
wire="fp8" casts all rows, however few.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fp8compile.formats import E4M3
from fp8compile.passes.collectives.gather_as_fp8 import (
    SAME,
    finish,
    record,
    replace_exactly,
    replace_rounded,
    why_inexact,
    why_none,
    why_small,
)
from fp8compile.passes.collectives.quantize_before_collective import Cast, Early, readers_of
from fp8compile.passes.core.collectives import ALL_TO_ALL, Journey, journeys
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.passes.core.node_views import argument

ROWS = Cast(E4M3.name, "row")
LEAST = 64  # elements of a row that is worth a scale of its own: numbers for a router have fewer


def run(c: Compilation) -> None:
    """Cast before all-to-alls, and say of each what became of it."""
    for collective in c.graph.find_nodes(op="call_function", target=ALL_TO_ALL):
        _add_up_rows(c, collective)
    finish(c, [journey for journey in journeys(c.graph, ALL_TO_ALL) if _exchange(c, journey)])


def _add_up_rows(c: Compilation, collective: fx.Node) -> None:
    """Let who asks how many rows arrive read the sum of the parts, so that only what waits for the rows reads them."""
    parts = argument(collective, "output_split_sizes")
    for size in [n for n in collective.users if n.target is aten.sym_size.int and argument(n, "dim") == 0]:
        rows = parts[0]
        for part in parts[1:]:
            rows = c.emit(operator.add, rows, part, like=size)
        size.replace_all_uses_with(rows)
        c.graph.erase_node(size)


def _exchange(c: Compilation, journey: Journey) -> bool:
    x = value(journey.source)
    if not x.is_floating_point() or x.element_size() == 1:
        return False
    readers = readers_of(journey)
    casts, reason = [*readers.early], SAME
    why, is_local = why_none(c, journey), _knows_its_rows(journey.collective)
    exact = "no FP8 matmul reads it" if not casts and not readers.late else why_inexact(readers, x)
    if is_local:
        casts, exact = [], exact or "other ranks may get other numbers of rows, and read them in BF16"
    if not why and exact:
        casts, reason = [*casts, ROWS][:1], "wire='fp8': its rows are rounded before they travel"
        why = _why_unfit(x) or ("" if c.options.wire == "fp8" else f"{exact}; wire='fp8' rounds it")
    why = why or ("" if is_local else why_small(c, journey, casts))
    record(c, journey, [] if why else casts, why or reason)
    if why:
        return False
    early = Early(c, journey)
    if exact:
        replace_rounded(early, readers, casts[0])
    else:
        replace_exactly(early, readers)
    return True


def _knows_its_rows(collective: fx.Node) -> bool:
    """Return True if a graph knows how many rows its rank sends and gets, so that its decisions may go by them."""
    sizes = [*argument(collective, "output_split_sizes"), *argument(collective, "input_split_sizes")]
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in sizes]
    return not any(has_free_unbacked_symbols(n) for n in values if isinstance(n, torch.SymInt))


def _why_unfit(x: torch.Tensor) -> str:
    """Return why the rows of `x` are not to be rounded; "" if they may be."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(x.dtype).removeprefix('torch.')}: the model asks for its precision"
    if x.dim() < 2 or not isinstance(x.shape[-1], int):
        return "it has no rows of a known size"
    return "" if x.shape[-1] >= LEAST else f"rows of {x.shape[-1]}: fewer than {LEAST}"
