"""Casts in one pass: a kernel casts by a scale that a sample predicts; a second one repairs where that was wrong.

A tensor's scale is known when all of it has been read. A region that computes what it casts would do so twice: once for
the amax, once to cast. Instead

    sample  = amax of every 16th row                a small kernel of its own
    scale   = where(is_predicted(amax, sample), predicted_scale(sample), scale(amax))

in which `amax` is an `all_amax` of the same region. It runs as two kernels (`launches`):

    first     casts by predicted_scale(sample), a power of two 8 to 16 times that of the sample; leaves amaxes in pieces
    repair    reads the pieces and stores the scale; where the prediction is wrong, it casts again, in place

The prediction is wrong where a payload would saturate, a number is not finite, or all of the sample is zero. So no
payload ever saturates, and what is stored loses at most four binades at the bottom of the format's range. Nothing is
kept from one step to the next: equal tensors have equal payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import PARTIALS, Buffer, Digits, Input, Part, Region, Store, Value, reached

EVERY = 16  # rows, of which one is in the sample
LEAST = 24 << 20  # bytes that are not read again: about 8 microseconds, as long as the two short kernels take
REPAIRING = 264  # programs of a repair, two for each multiprocessor; more only where rows have more tiles


@dataclass(frozen=True)
class Launch:
    """One kernel of a region.

    tensors: which of the region's tensors it reads, or after them which pieces of the first kernel; buffers: which of
    the region's buffers it fills, or after them which pieces.
    """

    region: Region
    schedule: Schedule
    tensors: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def is_repair(self) -> bool:
        """Return True if it casts only where a prediction was wrong."""
        return any(part.only_if is not None for part in self.region.parts)


def is_one_pass(region: Region) -> bool:
    """Return True if a region casts in one pass."""
    return any(part.only_if is None and _chosen(part) for part in region.parts)


def launches(region: Region, schedule: Schedule) -> list[Launch]:
    """Return the kernels that a region runs as: itself, or two where it casts in one pass."""
    if not is_one_pass(region):
        every = tuple(range(region.tensors)), tuple(range(len(region.buffers)))
        return [Launch(region, schedule, *every)]
    (part,) = region.parts
    maxima = _maxima(part)
    first = _first(region, part, maxima)
    repair = _repair(region, part, maxima, schedule.tilings[0].programs)
    return [_launched(first, schedule), _launched(repair, _of_repair(schedule))]


def count_amaxes(region: Region) -> int:
    """Return how many amaxes the first of two kernels leaves in pieces, FP32 [programs] each; 0 of one kernel."""
    return len(_maxima(region.parts[0])) if is_one_pass(region) else 0


def first_of(region: Region) -> Region:
    """Return the first kernel of a region that casts in one pass, for which a schedule is chosen; of others itself."""
    if not is_one_pass(region):
        return region
    (part,) = region.parts
    return _first(region, part, _maxima(part))


def sampled(part: Part) -> Part | None:
    """Return `part` of every 16th row; None where the rows of an input cannot be counted so.

    Where an input has rows in runs (197 tokens of an image after each other), a whole number of rows of each run is in
    the sample: 12 of these 197.
    """
    if not isinstance(part.rows, int) or any(v.op == "random" for v in part.values):
        return None
    run = min((size for i in part.inputs for size, _ in i.rows[-1:] if isinstance(size, int)), default=part.rows)
    if run < EVERY:
        return None
    inputs = []
    for i in part.inputs:
        rows = _every_16th(i.rows, run)
        if rows is None or (i.rows and prod(size for size, _ in i.rows) != part.rows):
            return None
        inputs.append(replace(i, rows=rows[0], offset=i.offset + rows[1]))
    return replace(part, rows=part.rows // run * (run // EVERY), inputs=tuple(inputs), row_divisor=1)


def _every_16th(digits: Digits, run: int) -> tuple[Digits, int] | None:
    """Return the digits of rows 8, 24, 40, … of each run of rows, and the offset of the first; None where the innermost
    digit is no whole number of runs."""
    if not digits:
        return (), 0
    *outer, (size, stride) = digits
    if not isinstance(size, int) or not isinstance(stride, int) or size % run:
        return None
    runs = ((size // run, run * stride),) if size > run else ()
    return (*outer, *runs, (run // EVERY, EVERY * stride)), EVERY // 2 * stride


# ---- what a region has ----------------------------------------------------------------------------------------------


def _chosen(part: Part) -> dict[int, int]:
    """Return the values that choose a scale -> the scale that is predicted."""
    values = part.values
    return {i: v.args[1] for i, v in enumerate(values) if v.op == "where" and values[v.args[0]].op == "is_predicted"}


def _maxima(part: Part) -> list[int]:
    """Return the amaxes of which scales are made."""
    read = {a for v in part.values for a in v.args}
    return [i for i, v in enumerate(part.values) if v.op == "all_amax" and i in read]


def _stores(part: Part, in_repair: bool) -> tuple[Store, ...]:
    """Return what one of both kernels stores: the repair scales and what is cast by them, the first all but scales."""
    chosen = set(_chosen(part))

    def belongs(store: Store) -> bool:
        is_cast = bool(chosen & reached(part.values, [store.value]))
        is_number = part.stored_extent(store) == (0, 0) and part.values[store.value].op not in PARTIALS
        return is_cast if in_repair else not (is_cast and is_number)

    return tuple(s for s in part.stores if belongs(s))


# ---- both kernels ---------------------------------------------------------------------------------------------------


def _first(region: Region, part: Part, maxima: list[int]) -> Region:
    """Return the region that casts by predicted scales, and leaves the pieces of amaxes behind the other buffers."""
    chosen = _chosen(part)
    values = tuple(replace(v, args=tuple(chosen.get(a, a) for a in v.args)) for v in part.values)
    count = len(region.buffers)
    pieces = tuple(Store(count + n, i) for n, i in enumerate(maxima))
    buffers = (*region.buffers, *(Buffer(("programs0",), "float32") for _ in maxima))
    stores = (*_stores(part, in_repair=False), *pieces)
    return replace(region, parts=(replace(part, values=values, stores=stores),), buffers=buffers)


def _repair(region: Region, part: Part, maxima: list[int], count: int) -> Region:
    """Return the region that stores scales, and casts again where one was not predicted; `count`: pieces of an amax."""
    values, inputs, strides = list(part.values), list(part.inputs), list(region.strides)
    for n, i in enumerate(maxima):
        values[i] = Value("load_max", (), (len(inputs),))
        inputs.append(Input(region.tensors + n, "float32", (), ((count, 1),)))
        strides += [(1,)] if region.strides else []

    def add(op: str, *args: int, params: tuple[float, ...] = ()) -> int:
        values.append(Value(op, args, params))
        return len(values) - 1

    wrong: list[int] = []
    zero = add("constant", params=(0.0,))
    for i in _chosen(part):
        is_predicted = values[i].args[0]
        nothing = add("eq", values[is_predicted].args[0], zero)
        wrong.append(add("not", add("or", is_predicted, nothing)))
    while len(wrong) > 1:
        wrong = [add("or", wrong[0], wrong[1]), *wrong[2:]]
    repaired = replace(
        part,
        values=tuple(values),
        inputs=tuple(inputs),
        stores=_stores(part, in_repair=True),
        only_if=wrong[0],
    )
    return replace(region, parts=(repaired,), strides=tuple(strides))


def _of_repair(schedule: Schedule) -> Schedule:
    """Return the schedule of the repair: the same tiles, over which few programs walk."""
    (tiling,) = schedule.tilings
    few = max(1, min(tiling.row_programs, REPAIRING // tiling.col_blocks))
    return replace(schedule, tilings=(replace(tiling, row_programs=few),))


def _launched(region: Region, schedule: Schedule) -> Launch:
    """Return a kernel of what `region` needs."""
    found = needed(region)
    return Launch(found.region, schedule, found.tensors, found.buffers)


@dataclass(frozen=True)
class Needed:
    """A region, and which tensors and buffers it has of another."""

    region: Region
    tensors: tuple[int, ...]
    buffers: tuple[int, ...]


def needed(region: Region) -> Needed:
    """Return a region of one part without the values, tensors and buffers of which nothing is stored."""
    (part,) = region.parts
    starts = [s.value for s in part.stores] + ([] if part.only_if is None else [part.only_if])
    kept = sorted(reached(part.values, starts))
    number = _numbers(kept)
    loads = sorted({part.values[i].params[0] for i in kept if part.values[i].op in ("load", "load_max")})
    load = _numbers(loads)
    tensors = sorted({t for i in loads for t in part.inputs[i].tensors})
    tensor = _numbers(tensors)
    buffers = sorted({s.buffer for s in part.stores})
    buffer = _numbers(buffers)

    def value(v: Value) -> Value:
        params = (load(v.params[0]),) if v.op in ("load", "load_max") else v.params
        return Value(v.op, tuple(map(number, v.args)), params)

    small = replace(
        part,
        inputs=tuple(part.inputs[i].renumbered(tensor) for i in loads),
        values=tuple(value(part.values[i]) for i in kept),
        stores=tuple(replace(s, buffer=buffer(s.buffer), value=number(s.value)) for s in part.stores),
        only_if=None if part.only_if is None else number(part.only_if),
    )
    strides = tuple(region.strides[t] for t in tensors) if region.strides else ()
    whole = replace(region, parts=(small,), buffers=tuple(region.buffers[b] for b in buffers), strides=strides)
    return Needed(whole, tuple(tensors), tuple(buffers))


def _numbers(kept: list[int]) -> Callable[[int], int]:
    """Return the function of an old number that gives its new one."""
    return {old: new for new, old in enumerate(kept)}.__getitem__
