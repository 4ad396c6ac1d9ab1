"""Rows of the plan for generated kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.one_pass import Launch, launches
from fp8compile.kernels.codegen.spec.region import Part, Region
from fp8compile.passes.core.marker_views import RegionCall
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.plan.rows import Kernel

BOOKKEEPING = ("load", "constant", "float", "round", "load_max")  # operations that say nothing about the kernel


def kernel_rows(graph: fx.Graph, half: str) -> list[Kernel]:
    """Return a row for each kernel of the regions of `graph`, in order; a repair, which seldom casts, moves nothing."""
    return [_kernel_row(node, kernel, half) for node in regions_of(graph) for kernel in launches(*spec_of(node))]


def _kernel_row(node: fx.Node, kernel: Launch, half: str) -> Kernel:
    region, schedule = kernel.region, kernel.schedule
    given: list[Any] = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in RegionCall(node).sizes]
    symbols = dict(zip(region.sizes, map(str, given), strict=True))
    seen = {name: hint(size, unknown=0) for name, size in zip(region.sizes, given, strict=True)}
    return Kernel(
        generated.kernel_name(region, schedule),
        half,
        tuple(f"{symbols.get(str(part.rows), part.rows)}×{part.cols}" for part in region.parts),
        _operations(region.parts),
        0 if 0 in seen.values() or kernel.is_repair else _moved(region, seen),
        region.origins,
    )


def _moved(region: Region, sizes: dict[str, int]) -> int:
    return sum(sum(generated.moved(part, region, sizes).values()) for part in region.parts)


def _operations(parts: tuple[Part, ...]) -> tuple[str, ...]:
    """Return operations with their counts, most frequent first; casts with their format."""
    counts: Counter[str] = Counter()
    for part in parts:
        for v in part.values:
            if v.op not in BOOKKEEPING:
                counts[f"{v.op} {v.params[0]}" if v.op == "quantize" else v.op] += 1
    return tuple(name if n == 1 else f"{name} ×{n}" for name, n in counts.most_common())
