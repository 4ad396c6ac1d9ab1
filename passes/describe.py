"""Describe regions: the rows of the plan for the kernels of a graph. It decides nothing."""

from __future__ import annotations

from collections import Counter

from torch import fx

from fp8compile.kernels import generated
from fp8compile.kernels.spec import Part
from fp8compile.passes.region_graph import regions_of, spec_of
from fp8compile.plan import Kernel

BOOKKEEPING = ("load", "constant", "float", "round", "load_max")  # operations that say nothing about the kernel


def describe_kernels(graph: fx.Graph, half: str) -> list[Kernel]:
    """A row for each region of `graph`, in order."""
    return [_describe(node, half) for node in regions_of(graph)]


def _describe(node: fx.Node, half: str) -> Kernel:
    region, schedule = spec_of(node)
    return Kernel(
        generated.kernel_name(region, schedule),
        half,
        tuple(f"{part.rows}×{part.cols}" for part in region.parts),
        _operations(region.parts),
        0 if region.sizes else sum(sum(generated.moved(part, region).values()) for part in region.parts),
        region.origins,
    )


def _operations(parts: tuple[Part, ...]) -> tuple[str, ...]:
    """Operations with their counts, most frequent first; casts with their format."""
    counts: Counter[str] = Counter()
    for part in parts:
        for v in part.values:
            if v.op not in BOOKKEEPING:
                counts[f"{v.op} {v.params[0]}" if v.op == "quantize" else v.op] += 1
    return tuple(name if n == 1 else f"{name} ×{n}" for name, n in counts.most_common())
