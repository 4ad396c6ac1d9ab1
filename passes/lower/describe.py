"""Describe what other passes decided: the plan's rows for kernels, saved and recomputed values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.spec import Part
from fp8compile.passes.core.collectives import is_sent
from fp8compile.passes.core.compilation import VIEWS, hint, is_tensor, value
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.saved_forms import Form, as_it_is, dtype_name, made_at
from fp8compile.plan.rows import Kernel, Recomputed, Saved

BOOKKEEPING = ("load", "constant", "float", "round", "load_max")  # operations that say nothing about the kernel
FP8_ONLY = (ops.amax, ops.scale, ops.delayed_scale, ops.quantize)  # what no other training has


def describe_kernels(graph: fx.Graph, half: str) -> list[Kernel]:
    """A row for each region of `graph`, in order."""
    return [_describe(node, half) for node in regions_of(graph)]


def _describe(node: fx.Node, half: str) -> Kernel:
    region, schedule = spec_of(node)
    given: list[Any] = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in node.args[1]]  # type: ignore[union-attr]
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
    kept = [n for n in saved if is_tensor(n) and n not in static]
    counted = static | {made_at(n) for n in kept if made_at(n).target not in FP8_ONLY}
    for node in kept:
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
                _before(node, counted),
            )
        )
    return rows


def _before(node: fx.Node, counted: set[fx.Node]) -> int | None:
    """`Saved.before`. counted: nodes whose bytes other rows have already; it grows."""
    cast = made_at(node)
    if cast.target not in FP8_ONLY:
        return None
    source = made_at(cast.args[0]) if cast.target is ops.quantize else None  # type: ignore[arg-type]
    if source is None or source in counted:
        return 0
    counted.add(source)
    return as_it_is(value(cast.args[0]), "").bytes  # type: ignore[arg-type]


def _why_itself(node: fx.Node) -> str:
    if node.target is ops.quantize or value(node).dtype in FP8_DTYPES or is_sent(node):
        return "a payload that a matmul of backward reads"
    if node.target in (ops.amax, ops.scale):
        return "an amax: its tensor is not read again for it"
    if not value(node).is_floating_point():
        return "complex numbers" if value(node).is_complex() else "indices or a mask"
    if "getitem" in str(node.target) and node.args[0].target is ops.chunked_loss:  # type: ignore[union-attr]
        return "a gradient: its loss is computed in chunks"
    return "made for backward alone" if node.op == "call_function" else "an input"


def describe_recomputed(nodes: Iterable[fx.Node], halves: Halves) -> dict[str, int]:
    """How many nodes of each operator of the forward half backward computes again; views cost nothing."""
    again = [n for n in nodes if n in halves.forward and n.target not in VIEWS and "getitem" not in str(n.target)]
    counts = Counter(str(n.target) for n in again)
    return dict(sorted(counts.items()))


def describe_restored(again: set[fx.Node], halves: Halves) -> list[Recomputed]:
    """A row for each value of the forward half that backward computes again and reads: not for the steps to it."""
    rows = []
    for node in sorted(n for n in again if n in halves.forward and is_tensor(n) and not _is_free(n)):
        if all(user in halves.forward for user in _readers(node)):
            continue
        x, steps, sources = value(node), 0, []
        seen, stack = {node}, [node]
        while stack:
            step = stack.pop()
            if step not in again:
                sources.append(step)
                continue
            steps += not _is_free(step)
            fresh = [i for i in step.all_input_nodes if i not in seen]
            seen.update(fresh)
            stack += fresh
        shape = tuple(n if isinstance(n, int) else str(n) for n in x.shape)
        kept = as_it_is(x, "").bytes
        where, line = module_path(node), source_line(node)
        labels = tuple(dict.fromkeys(_label(s, halves) for s in sorted(sources)))
        rows.append(Recomputed(node.name, where, line, shape, dtype_name(x), kept, steps, labels))
    return rows


def _is_free(node: fx.Node) -> bool:
    return node.target in VIEWS or "getitem" in str(node.target)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads it, also through views."""
    for user in node.users:
        if _is_free(user):
            yield from _readers(user)
        else:
            yield user


def _label(node: fx.Node, halves: Halves) -> str:
    if node in halves.static:
        return "parameters"
    form = halves.forms.get(node)
    return f"{node.name} ({form.name(value(node))})" if form is not None and is_tensor(node) else node.name
