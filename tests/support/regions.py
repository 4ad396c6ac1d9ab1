"""Random regions for property tests, each a function of its seed: what to compute, on what, in which tiles.

    Draw(seed)  =  region · schedule · a few lists of values for its symbolic sizes

Inputs, operations and stores are drawn from tables below; so that results say something, functions get arguments from
where they are tame (exp of at most 4, a quotient's denominator at least 1/2).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule, packed_transpose
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling, extent, in_bands, power_of_two
from fp8compile.kernels.codegen.spec.region import (
    BAND,
    ELEMENT,
    PARTIALS,
    ROW_REDUCTIONS,
    Buffer,
    Digits,
    Extent,
    Input,
    Part,
    Region,
    Size,
    Store,
    Value,
)  # fmt: skip

FLOATS = ("bfloat16", "bfloat16", "float16", "float32")
FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
GROUPS = (16, 32, 64, 128)
SMALL_ROWS = (1, 2, 3, 7, 16, 17, 24, 32, 40, 64)
SMALL_COLS = (1, 2, 5, 16, 31, 32, 48, 64, 96, 100, 128, 130, 256, 300)
LARGE_ROWS = (1, 33, 128, 200, 512, 1000)
LARGE_COLS = (8, 64, 96, 130, 256, 1000, 1024, 2048, 3000)
MAX_TILE = 1 << 14  # elements; more only where groups or whole rows take them
MAX_PER_WARP = 1 << 12  # beyond, the compiler takes its time to unroll
MAX_BLOCKS = 4  # tiles along a dimension, about: Triton's interpreter takes milliseconds for each


def _of_one_half(region: Region) -> Region:
    """Without FP16 results where BF16 is read: LLVM makes an FP16 addition of the FP32 addition of two BF16 numbers
    that is rounded to FP16, as if FP16 had the range of BF16."""
    if not any(i.dtype == "bfloat16" for part in region.parts for i in part.inputs):
        return region
    buffers = tuple(replace(b, dtype="bfloat16" if b.dtype == "float16" else b.dtype) for b in region.buffers)

    def in_bf16(value: Value) -> Value:
        return replace(value, params=("bfloat16",)) if value.op == "round" else value

    parts = tuple(replace(p, values=tuple(map(in_bf16, p.values))) for p in region.parts)
    return replace(region, parts=parts, buffers=buffers)


@dataclass(frozen=True)
class Draw:
    """A region to try, in these tiles, with these values for its sizes."""

    seed: int
    region: Region
    schedule: Schedule
    sizes: tuple[list[int], ...]


def draw(seed: int, large: bool = False, walkers: int = 3, images: bool = False) -> Draw:
    """The region of `seed`. At most `walkers` programs that walk over the rows side by side. `images`: half of what is
    loaded are values that an image has for all of its rows."""
    rng = random.Random(seed)
    rows, cols = (LARGE_ROWS, LARGE_COLS) if large else (SMALL_ROWS, SMALL_COLS)
    region, sizes = _Drawer(rng, rows, cols, images).region()
    region = _of_one_half(region)
    chosen = choose_schedule.choose(region)
    if rng.random() < 0.4:
        tilings = tuple(_tiling(part, rng) for part in region.parts)
        most = max(t.block_rows * t.block_cols for t in tilings)
        chosen = Schedule(tilings, min(32, max(rng.choice((1, 2, 4, 8)), most // MAX_PER_WARP)))
    if not choose_schedule.fits(chosen):  # a block of many wide rows
        return replace(draw(seed + 1_000_000, large, walkers, images), seed=seed)
    few = tuple(_few(part, tiling, walkers) for part, tiling in zip(region.parts, chosen.tilings, strict=True))
    return Draw(seed, region, replace(chosen, tilings=few), sizes)


def with_partials_twice(found: Draw) -> Draw:
    """The same, with whatever each program finds by itself (sums of columns, amaxes) stored in two buffers."""
    region, buffers, parts = found.region, list(found.region.buffers), []
    for part in region.parts:
        again = [s for s in part.stores if part.values[s.value].op in PARTIALS]
        stores = tuple(replace(s, buffer=len(buffers) + n) for n, s in enumerate(again))
        buffers += [region.buffers[s.buffer] for s in again]
        parts.append(replace(part, stores=(*part.stores, *stores)))
    return replace(found, region=replace(region, parts=tuple(parts), buffers=tuple(buffers)))


def with_columns_side_by_side(found: Draw) -> Draw:
    """The same, but where rows are reduced: what is loaded element by element has its columns in two or three
    arguments, of which each tile lies in one."""
    region, tensors, parts, tilings = found.region, found.region.tensors, [], []
    for part, tiling in zip(region.parts, found.schedule.tilings, strict=True):
        inputs = list(part.inputs)
        for n, x in enumerate(inputs if not any(part.levels) else ()):
            pieces = next((k for k in (3, 2) if x.cols and int(x.cols[0][0]) % k == 0), 0)
            if x.extent != ELEMENT or not pieces or part.cols // pieces % max(1, *(c for _, c in part.extents)):
                continue
            (size, stride), *inner = x.cols
            more = tuple(range(tensors, tensors + pieces - 1))
            inputs[n] = replace(x, cols=((int(size) // pieces, stride), *inner), beside=more)
            tensors += pieces - 1
        part = replace(part, inputs=tuple(inputs))
        if part.widths:
            (tiling,) = choose_schedule.choose(Region((part,), ())).tilings
        parts.append(part)
        tilings.append(tiling)
    schedule = replace(found.schedule, tilings=tuple(_few(p, t, 3) for p, t in zip(parts, tilings, strict=True)))
    return replace(found, region=replace(region, parts=tuple(parts)), schedule=schedule)


def failures(
    seed: int,
    target: str,
    device: str,
    data_seeds: int = 1,
    partials_twice: bool = False,
    side_by_side: bool = False,
    **drawn: Any,
) -> str:
    """Try the region of `seed` with all its sizes and `data_seeds` sets of data; what went wrong, and how to see it
    again, or ""."""
    found = draw(seed, **drawn)
    if partials_twice:
        found = with_partials_twice(found)
    if side_by_side:
        found = with_columns_side_by_side(found)
    kernel = generated.kernel_of(found.region, found.schedule, target)
    for n, sizes in enumerate(found.sizes):
        for k in range(data_seeds):
            inputs = check_kernel.random_inputs(found.region, sizes, seed + n + k, device)
            lines = check_kernel.check(kernel, found.region, found.schedule, inputs, sizes)
            if lines:
                how = {"partials_twice": partials_twice, "side_by_side": side_by_side, **drawn}
                again = f"regions.failures({seed}, {target!r}, {device!r}, {data_seeds}, **{how})"
                source = generated.file_source(found.region, found.schedule, target)
                return "\n".join([f"{again}: sizes {sizes}, data {seed + n + k}", *lines, source])
    return ""


def _tiling(part: Part, rng: random.Random) -> Tiling:
    """Any tiles that hold whole groups, and whole rows if rows are reduced."""
    least_rows = max((r for r, _ in part.extents), default=1) or 1
    least_cols = max((c for _, c in part.extents), default=1) or 1
    rows, cols = extent(part)
    sweeps = held = False
    if any(v.op in ROW_REDUCTIONS for v in part.values):
        if not any(v.op in ("col_sum", "col_amax") for v in part.values):
            sweeps, held = rng.choice(((False, False), (True, False), (False, True)))
        widest = power_of_two(cols)
        least_cols = max(least_cols, 1 if sweeps else widest // 8 if held else widest)
    some_rows = max(rng.choice((1, 2, 8, 16, 32, 128)), _of_few(rows if isinstance(rows, int) else 64))
    block_cols = max(least_cols, rng.choice((4, 16, 32, 128, 512)), _of_few(cols))
    block_rows = max(least_rows, min(some_rows, max(1, MAX_TILE // block_cols)))
    in_quarters = packed_transpose.possible(part) and rng.random() < 0.7
    if in_quarters:
        block_rows = max(block_rows, packed_transpose.STEP)
    blocks = ceil_div(rows, block_rows) if isinstance(rows, int) else 3
    block_rows, walkers = in_bands(part, block_rows, rng.randint(1, max(1, blocks)))
    return Tiling(block_rows, block_cols, walkers, ceil_div(cols, block_cols), sweeps, in_quarters, held)


def _of_few(length: int) -> int:
    """What a tile takes at least of a short dimension, to make few of them."""
    return power_of_two(length) // MAX_BLOCKS if length <= 512 else 1


def _few(part: Part, tiling: Tiling, walkers: int) -> Tiling:
    """Programs beyond `walkers` in a column of tiles walk instead, so that a trial takes few programs."""
    _, few = in_bands(part, tiling.block_rows, min(tiling.row_programs, walkers))
    return replace(tiling, row_programs=few)


class _Drawer:
    """Draws one region."""

    def __init__(self, rng: random.Random, rows: tuple[int, ...], cols: tuple[int, ...], images: bool):
        self.rng, self.some_rows, self.some_cols, self.images = rng, rows, cols, images
        self.buffers: list[Buffer] = []
        self.tensors = 0
        self.names: dict[str, Callable[[int], int]] = {}  # name -> its value, given the number of batches
        self.per_batch = 1

    def region(self) -> tuple[Region, tuple[list[int], ...]]:
        rng = self.rng
        self.bands = rng.choice((2, 3)) if rng.random() < 0.1 else 1
        batches, self.per_batch = _factors(rng.choice(self.some_rows), rng) if self.bands == 1 else (self.bands, BAND)
        self.divisor = 1
        self.rows: Size = batches * self.per_batch
        self.batches: Size = batches
        if self.bands == 1 and rng.random() < 0.3:
            self._make_symbolic()
        parts = [self._part(i) for i in range(rng.choice((1, 1, 1, 2, 3)))]
        if len(parts) > 1 and rng.random() < 0.5 and all(_element_load(p) is not None for p in parts):
            parts = self._side_by_side(parts)
        region = Region(tuple(parts), tuple(self.buffers))
        counts = sorted({1, self.most // 2, self.most}) if region.sizes else [0]
        return region, tuple([self.names[name](n) for name in region.sizes] for n in counts)

    def _make_symbolic(self) -> None:
        """n0 rows; n1 of batches; n2 rows rounded up to 16, for what is transposed and padded."""
        self.rows, self.batches = "n0", "n1"
        self.per_batch = self.rng.choice((1, 2, 8, 16, 5))
        self.most = ceil_div(max(self.some_rows), self.per_batch)
        self.divisor = self.rng.choice([d for d in (1, 2, 8, 16) if self.per_batch % d == 0])
        each = self.per_batch
        self.names = {"n0": lambda n: n * each, "n1": lambda n: n, "n2": lambda n: round_up(n * each, 16)}

    # ---- a part -------------------------------------------------------------------------------------------------

    def _part(self, number: int) -> Part:
        rng = self.rng
        draft = _Draft(self, rng.choice(self.some_cols), number)
        draft.operate(rng.randint(0, 7))
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice((draft.store_plain, draft.store_quantized, draft.store_quantized, draft.store_partial))()
        return Part(self.rows, draft.cols, tuple(draft.inputs), tuple(draft.values), tuple(draft.stores), self.divisor)

    def _side_by_side(self, parts: list[Part]) -> list[Part]:
        """Each part stores one more of its values into a buffer that they share."""
        self.buffers.append(Buffer((self.rows, sum(p.cols for p in parts)), "float32"))
        offset, found = 0, []
        for part in parts:
            value = self.rng.choice(_float_values(part.values))
            if part.extents[value] != ELEMENT:
                part = replace(part, values=(*part.values, Value("add", (_element_load(part), value))))
                value = len(part.values) - 1
            store = Store(len(self.buffers) - 1, value, sum(p.cols for p in parts), offset)
            found.append(replace(part, stores=(*part.stores, store)))
            offset += part.cols
        return found


def _element_load(part: Part) -> int | None:
    return next((i for i, v in enumerate(part.values) if part.extents[i] == ELEMENT and v.op == "load"), None)


def _factors(n: int, rng: random.Random) -> tuple[int, int]:
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    d = rng.choice(divisors)
    return n // d, d


def _float_values(values: tuple[Value, ...] | list[Value]) -> list[int]:
    return [i for i, v in enumerate(values) if v.op not in NO_FLOATS and not _is_special_load(values, i)]


NO_FLOATS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "quantize", "constant")
NO_FLOATS += ("all_amax", "col_sum", "col_amax")


def _is_special_load(values: Any, i: int) -> bool:
    return values[i].op == "load" and len(values[i].params) > 1


@dataclass
class _Draft:
    """A part that is being drawn. Its first value is a load that varies along all rows and columns there are."""

    drawer: _Drawer
    cols: int
    number: int
    inputs: list[Input] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    floats: list[int] = field(default_factory=list)
    bools: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = self.drawer.rng
        self.rows = self.drawer.rows
        self._load(self.rng.choice(PATTERNS[:5]))
        for _ in range(self.rng.randint(0, 3)):
            images = self.drawer.images and self.rng.random() < 0.5
            self._load(_per_batch if images else self.rng.choice(PATTERNS))

    def add(self, op: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        self.values.append(Value(op, args, params))
        return len(self.values) - 1

    def constant(self, x: float) -> int:
        return self.add("constant", params=(x,))

    def extent(self, i: int) -> Extent:
        return Part(self.rows, self.cols, tuple(self.inputs), tuple(self.values), ()).extents[i]

    def pick(self) -> int:
        return self.rng.choice(self.floats)

    # ---- inputs -------------------------------------------------------------------------------------------------

    def _load(self, pattern: Callable[[_Draft], tuple[Digits, Digits, int]]) -> None:
        kind = self.rng.random()
        if kind < 0.15:
            fmt = self.rng.choice(list(FP8.values()))
            data = self.read(fmt, pattern(self))
            scale = self.read("float32", self.rng.choice((_number, _row_statistic, _group_scales, _block_scales))(self))
            self.floats.append(self.add("mul", data, scale))
        elif kind < 0.25 and self.floats:
            self.bools.append(self.read("bool", pattern(self)))
        else:
            self.floats.append(self.read(self.rng.choice(FLOATS), pattern(self)))

    def read(self, dtype: str, where: tuple[Digits, Digits, int]) -> int:
        """A load. Loops of one step are left out at times, as passes leave them out always: what has one row or one
        column then does not vary along it."""
        rows, cols, offset = where
        if self.rng.random() < 0.7:
            rows, cols = _without_single_steps(rows), _without_single_steps(cols)
        self.inputs.append(Input(self.drawer.tensors, dtype, rows, cols, offset))
        self.drawer.tensors += 1
        return self.add("load", params=(len(self.inputs) - 1,))

    # ---- operations ---------------------------------------------------------------------------------------------

    def operate(self, count: int) -> None:
        for _ in range(count):
            self.floats.append(self.rng.choice(OPERATIONS)(self))

    def condition(self) -> int:
        rng = self.rng
        if self.bools and rng.random() < 0.7:
            found = rng.choice(self.bools)
        else:
            found = self.add(rng.choice(("lt", "le", "gt", "ge", "eq", "ne")), self.pick(), self.pick())
        if rng.random() < 0.3:
            found = self.add("not", found)
        if self.bools and rng.random() < 0.3:
            found = self.add(rng.choice(("and", "or", "xor")), found, rng.choice(self.bools))
        self.bools.append(found)
        return found

    # ---- stores -------------------------------------------------------------------------------------------------

    def buffer(self, shape: tuple[Any, ...], dtype: str) -> int:
        self.drawer.buffers.append(Buffer(shape, dtype))
        return len(self.drawer.buffers) - 1

    def store(self, value: int, dtype: str, transposed: bool, pad: bool) -> None:
        """Store `value` in a buffer of its own, with gaps between rows and an offset at times."""
        rows, cols = self.extent(value)
        symbolic = isinstance(self.rows, str)
        pad_rows = 16 if pad and (transposed or self.rng.random() < 0.5) else 1
        pad_cols = 16 if pad and (not transposed or self.rng.random() < 0.5) else 1
        if pad and (rows > 1 or cols > 1):
            pad_rows = pad_cols = 1
        rows, cols = rows or int(pad_rows > 1), cols or int(pad_cols > 1)  # as `Part.stored_extent` has it
        height = _steps(self.rows, rows, pad_rows)
        width = _steps(self.cols, cols, pad_cols)
        if transposed and symbolic and rows == 1:  # the stride between its rows is a size
            lead: Size = "n2" if pad_rows > 1 else "n0"
            height = lead
        elif transposed and symbolic and rows > 1:
            return self.store(value, dtype, False, pad)
        else:
            gap = self.rng.choice((0, 0, 0, 3))
            lead = (height if transposed else width) + gap if (transposed or width) else 1
        offset = self.rng.choice((0, 0, 0, 5))
        shape = (width, lead) if transposed else (height, lead)
        if offset:  # flat, with room for it
            if symbolic:
                shape, offset = ((*shape,), 0)
            else:
                shape = (shape[0] * shape[1] + offset,)
        self.stores.append(Store(self.buffer(shape, dtype), value, lead, offset, transposed, pad_rows, pad_cols))
        return None

    def store_plain(self) -> None:
        rng = self.rng
        if self.bools and rng.random() < 0.1:
            return self.store(rng.choice(self.bools), "bool", rng.random() < 0.3, False)
        return self.store(self.pick(), rng.choice(FLOATS), rng.random() < 0.3, rng.random() < 0.3)

    def store_quantized(self) -> None:
        """A quantization in one or two layouts, mostly with its scale."""
        rng = self.rng
        fmt = rng.choice(list(FP8))
        x = self.pick()
        scale = self.scale(x, fmt)
        data = self.add("quantize", x, scale, params=(fmt,))
        layouts = rng.choice(((False,), (True,), (False, True)))
        for transposed in layouts:
            self.store(data, FP8[fmt], transposed, rng.random() < 0.4)
        if rng.random() < 0.8:
            self.store(scale, "float32", rng.random() < 0.3, False)

    def scale(self, x: int, fmt: str) -> int:
        rng = self.rng
        how = rng.choice(("tensor", "row", "group", "col_group", "block", "constant"))
        if how == "tensor":
            count = rng.choice((1, 5, 16, 33))
            self.inputs.append(Input(self.drawer.tensors, "float32", (), ((count, 1),)))
            self.drawer.tensors += 1
            amax = self.add("load_max", params=(len(self.inputs) - 1,))
        elif how == "row":
            amax = self.add("row_amax", x)
        elif how == "constant":
            return self.add("abs", self.read("float32", _number(self)))  # scales are never negative
        else:
            amax = self.add(f"{how}_amax", x, params=(rng.choice(GROUPS),))
        return self.add(rng.choice(("scale", "scale", "scale_power_of_two")), amax, params=(fmt,))

    def store_partial(self) -> None:
        op = self.rng.choice(("all_amax", "col_sum", "col_amax"))
        params: tuple[int, ...] = ()
        if self.drawer.bands > 1 and self.rng.random() < 0.8:
            op, params = "col_sum", (self.drawer.bands,)
        value = self.add(op, self.pick(), params=params)
        shape = (f"programs{self.number}",) if op == "all_amax" else (f"row_programs{self.number}", self.cols)
        self.stores.append(Store(self.buffer(shape, "float32"), value))


def _without_single_steps(digits: Digits) -> Digits:
    return () if all(size == 1 for size, _ in digits) else digits


def _steps(size: Size, step: int, multiple: int) -> Any:
    """Rows or columns of a buffer for an extent."""
    if not step:
        return 1
    if isinstance(size, str):
        return (size, multiple) if multiple > 1 else size  # more than enough for groups
    return ceil_div(round_up(size, multiple), step)


# ---- where inputs lie -----------------------------------------------------------------------------------------------

Where = tuple[Digits, Digits, int]


def _contiguous(d: _Draft) -> Where:
    return ((d.rows, d.cols),), ((d.cols, 1),), 0


def _slice(d: _Draft) -> Where:
    offset = d.rng.choice((0, 1, 8, 16))
    return ((d.rows, d.cols + offset + d.rng.choice((0, 3, 16))),), ((d.cols, 1),), offset


def _transposed(d: _Draft) -> Where:
    return ((d.rows, 1),), ((d.cols, d.rows),), 0


def _heads(d: _Draft) -> Where:
    """[B, H, T, D] seen as [B·T, H·D]."""
    heads, each = _factors(d.cols, d.rng)
    t = d.drawer.per_batch
    return ((d.drawer.batches, heads * t * each), (t, each)), ((heads, t * each), (each, 1)), 0


def _pairs(d: _Draft) -> Where:
    """Columns from last to first of two halves: (2, h) → stride of the halves swapped in memory order."""
    halves, each = _factors(d.cols, d.rng)
    return ((d.rows, d.cols),), ((halves, 1), (each, halves)), 0


def _column(d: _Draft) -> Where:
    return ((d.rows, 0),), ((d.cols, 1),), 0


def _row_statistic(d: _Draft) -> Where:
    return ((d.rows, 1),), ((d.cols, 0),), 0


def _per_batch(d: _Draft) -> Where:
    one_each: Digits = ((1, 0),) if d.rng.random() < 0.5 else ()  # no group, however many rows
    return ((d.drawer.batches, d.cols), (d.drawer.per_batch, 0), *one_each), ((d.cols, 1),), 0


def _number(d: _Draft) -> Where:
    return d.rng.choice(((((d.rows, 0),), ((d.cols, 0),), d.rng.choice((0, 2))), ((), (), 0)))


def _group_scales(d: _Draft) -> Where:
    size = d.rng.choice(GROUPS)
    groups = ceil_div(d.cols, size)
    return ((d.rows, groups),), ((groups, 1), (size, 0)), 0


def _block_scales(d: _Draft) -> Where:
    size = d.rng.choice(GROUPS)
    groups = ceil_div(d.cols, size)
    if isinstance(d.rows, str):
        return _group_scales(d)
    return ((ceil_div(d.rows, size), groups), (size, 0)), ((groups, 1), (size, 0)), 0


PATTERNS = (
    _contiguous, _slice, _transposed, _heads, _pairs, _contiguous, _column, _row_statistic, _per_batch, _number,
    _group_scales, _block_scales,
)  # fmt: skip


# ---- what is computed -----------------------------------------------------------------------------------------------

Operation = Callable[[_Draft], int]


def _binary(op: str) -> Operation:
    return lambda d: d.add(op, d.pick(), d.pick())


def _unary(op: str) -> Operation:
    return lambda d: d.add(op, d.pick())


def _with_constant(op: str) -> Operation:
    return lambda d: d.add(op, d.pick(), d.constant(d.rng.choice((-1.5, 0.0, 0.5, 1.0, 3.0))))


def _at_most_4(op: str) -> Operation:
    return lambda d: d.add(op, d.add("minimum", d.pick(), d.constant(4.0)))


def _positive(op: str) -> Operation:
    return lambda d: d.add(op, d.add("add", d.add("abs", d.pick()), d.constant(0.5)))


def _quotient(d: _Draft) -> int:
    return d.add("div", d.pick(), d.add("add", d.add("abs", d.pick()), d.constant(0.5)))


def _sqrt(d: _Draft) -> int:
    return d.add("sqrt", d.add("abs", d.pick()))


def _log1p(d: _Draft) -> int:
    return d.add("log1p", d.add("abs", d.pick()))


def _where(d: _Draft) -> int:
    condition = d.condition()
    return d.add("where", condition, d.pick(), d.rng.choice((d.pick(), d.constant(0.0))))


def _as_float(d: _Draft) -> int:
    return d.add("float", d.condition())


def _rounded(d: _Draft) -> int:
    return d.add("round", d.pick(), params=(d.rng.choice(("bfloat16", "float16")),))


def _fused(d: _Draft) -> int:
    return d.add(d.rng.choice(("add", "sub")), d.add("mul", d.pick(), d.pick()), d.pick())


def _row_reduction(d: _Draft) -> int:
    return d.add(d.rng.choice(ROW_REDUCTIONS), d.pick())


def _normalized(d: _Draft) -> int:
    """x / √(mean of x² + 1/2), as in a norm."""
    x = d.pick()
    mean = d.add("mul", d.add("row_sum", d.add("mul", x, x)), d.constant(1 / d.cols))
    return d.add("mul", x, d.add("rsqrt", d.add("add", mean, d.constant(0.5))))


def _softmax(d: _Draft) -> int:
    x = d.pick()
    e = d.add("exp", d.add("sub", x, d.add("row_max", x)))
    return d.add("div", e, d.add("row_sum", e))


def _dropout(d: _Draft) -> int:
    seed = d.read("int64", ((), (), d.rng.choice((0, 1))))
    rows: Digits = ((d.rows, d.cols),)
    kept = d.add("lt", d.add("random", seed, params=(rows, ((d.cols, 1),))), d.constant(0.7))
    return d.add("where", kept, d.pick(), d.constant(0.0))


def _uniform(d: _Draft) -> int:
    seed = d.read("int64", ((), (), 0))
    return d.add("random", seed, params=(((d.rows, d.cols),), ((d.cols, 1),)))


OPERATIONS: tuple[Operation, ...] = (
    *(_binary(op) for op in ("add", "sub", "mul", "maximum", "minimum")),
    *(_with_constant(op) for op in ("add", "mul", "maximum", "minimum", "sub")),
    *(_unary(op) for op in ("neg", "abs", "sin", "cos", "tanh", "erf", "sigmoid", "floor", "ceil")),
    *(_unary(op) for op in ("one_plus_tanh", "one_plus_erf")),
    *(_at_most_4(op) for op in ("exp", "exp2", "expm1")),
    *(_positive(op) for op in ("log", "log2", "rsqrt", "reciprocal")),
    _quotient, _sqrt, _log1p, _where, _where, _as_float, _rounded, _fused, _row_reduction, _row_reduction, _normalized,
    _softmax, _dropout, _uniform,
)  # fmt: skip
