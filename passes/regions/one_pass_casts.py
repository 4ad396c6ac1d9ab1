"""One-pass casts: a region that reads a gradient for its amax, and one that casts it, become one that does both.

Before      %p = region(%g, %h)                amaxes in pieces, and column sums
            %q, %s = region(%g, %h, %p)        computes the same once more, and casts it
After       %n = region(%g, %h)                amaxes of every 16th row
            %q, %s = region(%g, %h, %n)        casts by the scale that they predict; repaired where that is wrong

What the first stores element by element for the second is no longer stored, unless others read it too.

`kernels/codegen/schedule/one_pass.py` says what is predicted and repaired. Sound, as both read the same tensors: what
the second reads besides must not wait for the first. Done where the first moves so much that a sample and a look at the
pieces, two short kernels, cost less; and in backward graphs only. Activations have outliers of some thousand times
their deviation, and weights may: for these, four binades at the bottom of the range are too much.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.generated import moved
from fp8compile.kernels.codegen.schedule import choose_schedule, one_pass
from fp8compile.kernels.codegen.schedule.tile_layout import TileLayout
from fp8compile.kernels.codegen.spec.region import ELEMENT, PARTIALS, ROW_REDUCTIONS, Input, Part, Region, Store, Value
from fp8compile.passes.core.compilation import base, getitems, remove_dead
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.regions.region_graph import (
    GraphEditor,
    is_from_region,
    put_in_order,
    regions_of,
    spec_of,
    tensors_of,
)

LEAST = one_pass.LEAST
MOST_REPAIRING = 528  # programs of a repair: four for each multiprocessor, which find nothing to do at once
MOST_PIECES = 2048  # of an amax, which each program of a repair reads: more than run at a time with 4 warps
ACCUMULATED = ("all_amax", "col_sum")
SCALES = ("scale", "scale_power_of_two")


@dataclass(frozen=True)
class Pair:
    """A region that finds amaxes, and the one that casts by them.

    amaxes: buffer of the first -> its result; handed: what the second loads as the first has stored it -> that store.
    """

    finding: fx.Node
    casting: fx.Node
    amaxes: dict[int, fx.Node]
    handed: dict[fx.Node, Store]


@dataclass
class Draft:
    """A part that is put together of two; equal values are one."""

    tensors: list[fx.Node] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def add(self, op: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """Return the number of a value, which may be there already."""
        item = Value(op, args, params)
        if item not in self.values:
            self.values.append(item)
        return self.values.index(item)

    def load(self, op: str, x: Input, tensors: Sequence[fx.Node], strides: Sequence[Any]) -> int:
        """Return the number of the value that loads `x`, whose numbers are those of `tensors`."""
        for t in x.tensors:
            if tensors[t] not in self.tensors:
                self.tensors.append(tensors[t])
                self.strides.append(strides[t])
        x = x.renumbered(lambda t: self.tensors.index(tensors[t]))
        if x not in self.inputs:
            self.inputs.append(x)
        return self.add(op, params=(self.inputs.index(x),))


def cast_in_one_pass(editor: GraphEditor) -> None:
    """Put one-pass casts in place of all pairs of regions for which they are faster."""
    remove_dead(editor.graph)  # amaxes whose pieces are read instead
    editor.number()
    for node in regions_of(editor.graph):
        if node._erased:
            continue
        pair = _pair_of(editor, node)  # in the graph as it is now: another pair, now one region, may wait for this one
        if pair is not None and _replace(editor, pair):
            put_in_order(editor.graph)
            remove_dead(editor.graph)
            editor.number()


# ---- which regions --------------------------------------------------------------------------------------------------


def _pair_of(editor: GraphEditor, casting: fx.Node) -> Pair | None:
    """Return the pair that `casting` is the second of; None if there is none, or it is no faster in one pass."""
    part = _plain(casting)
    if part is None or any(v.op in PARTIALS for v in part.values) or not _only_scales(part):
        return None
    tensors = tensors_of(casting)
    pieces = {tensors[part.inputs[v.params[0]].tensor] for v in part.values if v.op == "load_max"}
    if not all(map(is_from_region, pieces)) or len({Getitem(p).source for p in pieces}) != 1:
        return None
    finding = Getitem(next(iter(pieces))).source
    amaxes = {Getitem(p).index: p for p in pieces}
    if not _finds(finding, amaxes, part) or any(set(p.users) != {casting} for p in pieces):
        return None
    pair = Pair(finding, casting, amaxes, _handed_on(finding, casting))
    others = [t for t in tensors if t not in pieces and t not in pair.handed]
    return None if editor.waits_for_itself(others, [finding]) else pair


def _handed_on(finding: fx.Node, casting: fx.Node) -> dict[fx.Node, Store]:
    """Return what `casting` loads exactly as `finding` has stored it -> that store."""
    (first, _), (second, _) = spec_of(finding), spec_of(casting)
    items, found = {item: n for n, item in getitems(finding).items()}, dict[fx.Node, Store]()
    stores = {s.buffer: s for s in first.parts[0].stores if _is_plain(first.parts[0], s)}
    for t, tensor in enumerate(tensors_of(casting)):
        store = stores.get(items.get(base(tensor), -1))
        loads = [i for i in second.parts[0].inputs if t in i.tensors]
        if store is not None and all(_reads(i, first.parts[0], first.buffers[store.buffer].dtype) for i in loads):
            found[tensor] = store
    return found


def _is_plain(part: Part, store: Store) -> bool:
    """Return True if a store writes element by element, row after row."""
    by_element = part.values[store.value].op not in (*PARTIALS, "quantize") and part.extents[store.value] == ELEMENT
    alone = sum(s.buffer == store.buffer for s in part.stores) == 1
    return alone and by_element and not store.transposed and store.lead == part.cols and store.offset == 0


def _reads(x: Input, part: Part, dtype: str) -> bool:
    """Return True if `x` is element (r, c) of a tensor of this dtype, of the rows and columns of `part`."""
    place = x.dtype, x.rows, x.cols, x.offset, x.beside
    return place == (dtype, ((part.rows, part.cols),), ((part.cols, 1),), 0, ())


def _plain(node: fx.Node) -> Part | None:
    """Return the only part of a region of known sizes, if it has no row reductions and no random numbers."""
    region, _ = spec_of(node)
    (part, *more) = region.parts
    if more or region.sizes or part.bands > 1 or one_pass.is_one_pass(region):
        return None
    return None if any(v.op in (*ROW_REDUCTIONS, "random") for v in part.values) else part


def _only_scales(part: Part) -> bool:
    """Return True if maxima are read, and only scales are made of them."""
    maxima = _maxima(part)
    users = {v.op for i, v in enumerate(part.values) if set(v.args) & maxima and i not in maxima}
    return bool(maxima) and users <= set(SCALES) and not any(s.value in maxima for s in part.stores)


def _maxima(part: Part) -> set[int]:
    """Return the maxima that are read, and the greatest of several."""
    found: set[int] = set()
    for i, v in enumerate(part.values):
        if v.op == "load_max" or (v.op == "maximum" and set(v.args) <= found):
            found.add(i)
    return found


def _finds(node: fx.Node, amaxes: dict[int, fx.Node], casting: Part) -> bool:
    """Return True if a region finds these amaxes of what `casting` casts, and moves enough."""
    part, (region, _) = _plain(node), spec_of(node)
    if part is None or (part.rows, part.cols) != (casting.rows, casting.cols):
        return False
    found = {s.buffer for s in part.stores if part.values[s.value].op == "all_amax"}
    known = all(part.values[s.value].op not in PARTIALS or part.values[s.value].op in ACCUMULATED for s in part.stores)
    return known and found == set(amaxes) and sum(moved(part, region).values()) >= LEAST


# ---- one of two -----------------------------------------------------------------------------------------------------


def _replace(editor: GraphEditor, pair: Pair) -> bool:
    """Put the sample and the casts in place of a pair; returns False where that cannot be."""
    sample = _sample_of(pair.finding)
    if sample is None:
        return False
    spec, how = sample.region.to_json(), choose_schedule.choose(sample.region)
    if not _may_repair(_both(pair, pair.amaxes, how.programs)[0]):
        return False
    finding, casting = pair.finding, pair.casting
    reads = [tensors_of(finding)[t] for t in sample.tensors]
    found = editor.emit(ops.region, reads, [], spec, how.to_json(), before=finding, like=finding)
    pieces = {
        buffer: editor.emit(operator.getitem, found, n, before=finding, like=finding)
        for n, buffer in enumerate(sorted(pair.amaxes))
    }
    region, tensors, others = _both(pair, pieces, how.programs)
    how = choose_schedule.choose(region)
    node = editor.emit(ops.region, tensors, [], region.to_json(), how.to_json(), before=casting, like=casting)
    of_finding = getitems(finding)
    items = {**getitems(casting), **{new: of_finding[old] for old, new in others.items() if old in of_finding}}
    for n, item in items.items():
        item.args = (node, n)
        editor.refresh(item)
    return True


def _sample_of(finding: fx.Node) -> one_pass.Needed | None:
    """Return the region that finds the amaxes of every 16th row, and which tensors it reads; None if rows cannot be
    counted so."""
    region, _ = spec_of(finding)
    part = one_pass.sampled(region.parts[0])
    if part is None:
        return None
    amaxes = tuple(s for s in part.stores if part.values[s.value].op == "all_amax")
    return one_pass.needed(replace(region, parts=(replace(part, stores=amaxes),)))


def _both(pair: Pair, sampled: dict[int, fx.Node], pieces: int) -> tuple[Region, list[fx.Node], dict[int, int]]:
    """Return the region that does what both do, what it reads, and what else the first stores: its buffers -> new ones.

    sampled: buffer of an amax -> the amaxes of the sample, in so many pieces.
    """
    (first, _), (second, _) = spec_of(pair.finding), spec_of(pair.casting)
    (finds,), (casts,) = first.parts, second.parts
    draft = Draft()
    of_first = _copied(draft, pair.finding, finds, {}, {})
    amax = {s.buffer: of_first[s.value] for s in finds.stores if finds.values[s.value].op == "all_amax"}
    buffer_of = {node: buffer for buffer, node in pair.amaxes.items()}
    reads, maxima = tensors_of(pair.casting), dict[int, tuple[int, int]]()
    for i, v in enumerate(casts.values):
        if v.op == "load_max":
            buffer = buffer_of[reads[casts.inputs[v.params[0]].tensor]]
            maximum = Input(0, "float32", (), ((pieces, 1),))
            maxima[i] = amax[buffer], draft.load("load_max", maximum, [sampled[buffer]], [(1,)])
    dtypes = [buffer.dtype for buffer in first.buffers]
    handed = {tensor: _as_loaded(draft, of_first[s.value], dtypes[s.buffer]) for tensor, s in pair.handed.items()}
    of_second = _copied(draft, pair.casting, casts, maxima, handed)
    stores = [replace(s, value=of_second[s.value]) for s in casts.stores]
    buffers, others = list(second.buffers), dict[int, int]()
    dropped = {s.buffer for tensor, s in pair.handed.items() if set(base(tensor).users) == {pair.casting}}
    for s in finds.stores:
        if finds.values[s.value].op != "all_amax" and s.buffer not in dropped:
            if s.buffer not in others:
                others[s.buffer] = len(buffers)
                buffers.append(first.buffers[s.buffer])
            stores.append(replace(s, buffer=others[s.buffer], value=of_first[s.value]))
    part = replace(casts, inputs=tuple(draft.inputs), values=tuple(draft.values), stores=tuple(stores))
    origins = tuple(dict.fromkeys((*second.origins, *first.origins)))
    region = Region((part,), tuple(buffers), origins, tuple(draft.strides))
    return region, draft.tensors, others


def _as_loaded(draft: Draft, i: int, dtype: str) -> int:
    """Return the number of value `i` with the bits that a load of what was stored has: it may be compared."""
    return i if dtype in ("float32", "bool") else draft.add("round", i, params=(dtype,))


def _copied(
    draft: Draft, node: fx.Node, part: Part, maxima: dict[int, tuple[int, int]], handed: dict[fx.Node, int]
) -> list[int]:
    """Write the values of a part into `draft`; returns the new number of each.

    maxima: values that are amaxes -> (the amax in this region, that of the sample). Scales of them are predicted.
    handed: tensors whose elements are values here, and are not loaded.
    """
    region, tensors, numbers = spec_of(node)[0], tensors_of(node), list[int]()
    for i, v in enumerate(part.values):
        args = tuple(numbers[a] for a in v.args)
        if i in maxima:
            numbers.append(maxima[i][0])
        elif v.op in ("load", "load_max"):
            x = part.inputs[v.params[0]]
            if tensors[x.tensor] in handed:
                numbers.append(handed[tensors[x.tensor]])
                continue
            numbers.append(draft.load(v.op, x, tensors, region.strides))
        elif v.op == "maximum" and set(v.args) <= set(maxima):
            of_sample = draft.add("maximum", *(maxima[a][1] for a in v.args))
            numbers.append(draft.add("maximum", *args))
            maxima[i] = numbers[-1], of_sample
        elif v.op in SCALES and v.args[0] in maxima:
            numbers.append(_scale(draft, v, *maxima[v.args[0]]))
        else:
            numbers.append(draft.add(v.op, *args, params=v.params))
    return numbers


def _scale(draft: Draft, scale: Value, amax: int, sample: int) -> int:
    """Return the number of the scale that is predicted, or made of the amax."""
    format = scale.params[:1]
    own = draft.add(scale.op, amax, params=scale.params)
    predicted = draft.add("predicted_scale", sample, params=format)
    return draft.add("where", draft.add("is_predicted", amax, sample, params=format), predicted, own)


def _may_repair(region: Region) -> bool:
    """Return True if both kernels can be made, and few programs of the second walk: it is their walk that it skips."""
    schedule = choose_schedule.choose(region)
    repair = one_pass.launches(region, schedule)[-1]
    walks = TileLayout(repair.region.parts[0], repair.schedule.tilings[0]).loops
    if repair.schedule.programs > MOST_REPAIRING or schedule.programs > MOST_PIECES:
        return False
    return walks and choose_schedule.fits(schedule) and choose_schedule.fits(repair.schedule)
