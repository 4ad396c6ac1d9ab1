"""Rows of the plan for what backward is given, and for what it computes again."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from torch import fx

from fp8compile import ops
from fp8compile.passes.core.compilation import VIEWS, is_tensor, value
from fp8compile.passes.core.fusible import made_at
from fp8compile.passes.core.marker_views import GroupedPart, Quantize, is_amax
from fp8compile.passes.core.matmul_node import plain
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.core.walk import walk
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.saved_forms import bytes_of, dtype_name
from fp8compile.passes.save.saved_value import SavedValue
from fp8compile.plan.rows import Recomputed, Saved

FP8_ONLY = (ops.scale, ops.delayed_scale, ops.quantize)  # and amaxes: what no other training has


def saved_rows(saved: Iterable[SavedValue], parameters: Set[fx.Node], moved: Iterable[fx.Node] = ()) -> list[Saved]:
    """Return a row for each saved tensor that is no parameter. moved: what lies in the host's memory."""
    told = [s for s in saved if s.has_row]
    counted = set(parameters) | {made for s in told if not _is_fp8_only(made := made_at(s.node))}
    on_host = set(moved)
    return [_saved_row(s, _bytes_before(s.node, counted), not on_host.isdisjoint(s.kept)) for s in told]


def _saved_row(saved: SavedValue, before: int | None, on_host: bool) -> Saved:
    x, made, form = value(saved.node), made_at(saved.node), saved.form
    shape = tuple(map(plain, x.shape))
    why = f"{form.why.text}; it waits on the host" if on_host else form.why.text
    return Saved(
        saved.node.name, module_path(made), source_line(made), shape, dtype_name(x), form.name(x), form.bytes,
        why, before, form.why.code, on_host,
    )  # fmt: skip


def _bytes_before(node: fx.Node, counted: set[fx.Node]) -> int | None:
    """Return `Saved.before`. counted: nodes whose bytes other rows have already; it grows."""
    made = made_at(node)
    if not _is_fp8_only(made):
        return None
    x = _cast_by(made)
    if x is None or made_at(x) in counted:
        return 0
    counted.add(made_at(x))
    return bytes_of(value(x))


def _is_fp8_only(node: fx.Node) -> bool:
    return node.target in FP8_ONLY or is_amax(node) or GroupedPart.of(node) is not None


def _cast_by(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which `node` is the payload; None if it is none."""
    part = GroupedPart.of(node)
    cast = part.cast if part is not None and part.is_payload else Quantize.of(node)
    return None if cast is None else cast.x


def count_recomputed(nodes: Iterable[fx.Node], halves: Halves) -> dict[str, int]:
    """Return how many nodes of each operator of the forward half backward computes again; views cost nothing."""
    counts = Counter(str(n.target) for n in nodes if n in halves.forward and not _is_free(n))
    return dict(sorted(counts.items()))


def recomputed_rows(again: set[fx.Node], halves: Halves) -> list[Recomputed]:
    """Return a row for each value of the forward half that backward computes again and reads: not for the steps to
    it."""
    return [
        _recomputed_row(node, again, halves)
        for node in sorted(n for n in again if n in halves.forward and is_tensor(n) and not _is_free(n))
        if not all(user in halves.forward for user in _readers(node))
    ]


def _recomputed_row(node: fx.Node, again: set[fx.Node], halves: Halves) -> Recomputed:
    reached = list(walk([node], through=again.__contains__))
    steps = sum(1 for n in reached if n in again and not _is_free(n))
    sources = sorted(n for n in reached if n not in again)
    labels = tuple(dict.fromkeys(_label(n, halves) for n in sources))
    x = value(node)
    shape = tuple(map(plain, x.shape))
    where, line = module_path(node), source_line(node)
    return Recomputed(node.name, where, line, shape, dtype_name(x), bytes_of(x), steps, labels)


def _is_free(node: fx.Node) -> bool:
    return node.target in VIEWS or node.target is operator.getitem


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read `node`, also through views."""
    return (n for n in walk(node.users, lambda n: n.users, _is_free) if not _is_free(n))


def _label(node: fx.Node, halves: Halves) -> str:
    if node in halves.static:
        return "parameters"
    form = halves.forms.get(node)
    return f"{node.name} ({form.name(value(node))})" if form is not None and is_tensor(node) else node.name
