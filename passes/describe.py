"""Describe what other passes decided: the plan's rows for kernels, saved and recomputed values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import fx

from fp8compile import ops
from fp8compile.kernels import generated
from fp8compile.kernels.spec import Part
from fp8compile.passes.compilation import VIEWS, is_tensor, value
from fp8compile.passes.origin import module_path, source_line
from fp8compile.passes.plan_saved import Halves
from fp8compile.passes.region_graph import regions_of, spec_of
from fp8compile.passes.saved_forms import Form, as_it_is, dtype_name, made_at
from fp8compile.plan import Kernel, Saved

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


def describe_saved(saved: Iterable[fx.Node], static: set[fx.Node], forms: Mapping[fx.Node, Form]) -> list[Saved]:
    """A row for each saved tensor that is no parameter (`static`)."""
    rows = []
    for node in saved:
        if not is_tensor(node) or node in static:
            continue
        x = value(node)
        form = forms.get(node) or as_it_is(x, _why_itself(node))
        shape = tuple(n if isinstance(n, int) else str(n) for n in x.shape)
        rows.append(
            Saved(
                node.name,
                module_path(made_at(node)),
                source_line(made_at(node)),
                shape,
                dtype_name(x),
                form.name(x),
                form.bytes,
                form.reason,
            )
        )
    return rows


def _why_itself(node: fx.Node) -> str:
    if node.target is ops.quantize:
        return "a payload that a matmul of backward reads"
    if node.target in (ops.amax, ops.scale):
        return "an amax: its tensor is not read again for it"
    if not value(node).is_floating_point():
        return "indices or a mask"
    if "getitem" in str(node.target) and node.args[0].target is ops.chunked_loss:  # type: ignore[union-attr]
        return "a gradient: its loss is computed in chunks"
    return "made for backward alone" if node.op == "call_function" else "an input"


def describe_recomputed(nodes: Iterable[fx.Node], halves: Halves) -> dict[str, int]:
    """How many nodes of each operator of the forward half backward computes again; views cost nothing."""
    again = [n for n in nodes if n in halves.forward and n.target not in VIEWS and "getitem" not in str(n.target)]
    counts = Counter(str(n.target) for n in again)
    return dict(sorted(counts.items()))
