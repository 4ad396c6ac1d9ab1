"""Rows of the plan for generated kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.spec import Part
from fp8compile.passes.core.compilation import hint
from fp8compile.passes.core.marker_views import RegionCall
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.plan.rows import Kernel

BOOKKEEPING = ("load", "constant", "float", "round", "load_max")  # operations that say nothing about the kernel


def kernel_rows(graph: fx.Graph, half: str) -> list[Kernel]:
    """Return a row for each region of `graph`, in order."""
    return [_kernel_row(node, half) for node in regions_of(graph)]


def _kernel_row(node: fx.Node, half: str) -> Kernel:
    region, schedule = spec_of(node)
    given: list[Any] = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in RegionCall(node).sizes]
    symbols = dict(zip(region.sizes, map(str, given), strict=True))
    seen = {name: hint(size, unknown=0) for name, size in zip(region.sizes, given, strict=True)}
    return Kernel(
        generated.kernel_name(region, schedule),
        half,
        tuple(f"{symbols.get(str(part.rows), part.rows)}×{part.cols}" for part in region.parts),
        _operations(region.parts),
        0 if 0 in seen.values() else sum(sum(generated.moved(part, region, seen).values()) for part in region.parts),
        region.origins,
    )


def _operations(parts: tuple[Part, ...]) -> tuple[str, ...]:
    """Return operations with their counts, most frequent first; casts with their format."""
    counts: Counter[str] = Counter()
    for part in parts:
        for v in part.values:
            if v.op not in BOOKKEEPING:
                counts[f"{v.op} {v.params[0]}" if v.op == "quantize" else v.op] += 1
    return tuple(name if n == 1 else f"{name} ×{n}" for name, n in counts.most_common())
