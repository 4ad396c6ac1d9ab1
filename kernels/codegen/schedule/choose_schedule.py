"""Choose the schedule of a region from its shape alone, so that it is the same on every machine.

The numbers are the best that were measured on an H200.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from fp8compile.formats import ceil_div
from fp8compile.kernels.codegen.schedule import one_pass, packed_transpose
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling, extent, in_bands, power_of_two
from fp8compile.kernels.codegen.spec.region import (
    COLUMN,
    ELEMENT,
    GROUP_REDUCTIONS,
    PARTIALS,
    ROW_REDUCTIONS,
    Input,
    Part,
    Region,
)

MAX_ROW = 65536  # elements of the rows of all inputs that one program can hold in registers
WALKED = ("col_sum", "col_amax")  # what is cheaper with few programs that walk
MAX_ELEMENTS = 256  # a thread has of each tensor; with more, compiling takes minutes
SECTOR, CROSSED = 8, 32  # least and most rows of a tile of whole rows that lie across: 32 and 128 bytes of FP32
SQUARE = 64  # rows and columns of a tile that are enough for what lies across
LARGEST_TILE = 16384  # elements of a tile of several rows, where groups of rows do not ask for more
MOST_SHARED = 232_448  # bytes of shared memory that a program can have on an H100 or H200
SHARED_MEMORY = 200_000  # bytes of it that reading ahead may take
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PACKED = {1: (128, 64, 32), 2: (32, 128, 32), 3: (32, 128, 16)}  # by payloads: rows, columns, elements a thread
HELD = 2048  # columns of a tile of rows that are held, where what covers them closely would be narrow
# Programs a multiprocessor that walk down tiles which they store transposed. Of amaxes, they leave no more pieces than
# the next kernel reads; where it casts in one pass, only the repair does.
RUNS, RUNS_IN_ONE_PASS = 7, 14
PROCESSORS = 132  # programs that walk are made in multiples of this: streaming multiprocessors of an H100 or H200


def choose(region: Region) -> Schedule:
    """Return the schedule for `region`; for one that casts in one pass, that of its first kernel."""
    choices = [_choose(part) for part in one_pass.first_of(region).parts]
    warps = max(choice.warps for choice in choices)
    stages = max(choice.stages for choice in choices)
    return Schedule(tuple(choice.tilings[0] for choice in choices), warps, stages)


def fits(schedule: Schedule) -> bool:
    """Return True if a program can hold its tiles: in the registers of its threads, and those of several rows in shared
    memory, through which they go, as FP32 at most, where threads exchange what they have."""
    crossing = max((t.block_rows * t.block_cols for t in schedule.tilings if t.block_rows > 1), default=0)
    return schedule.elements_a_thread <= MAX_ELEMENTS and 4 * crossing <= MOST_SHARED


def _choose(part: Part) -> Schedule:
    """Return the schedule of a kernel of this part alone."""
    ops = {v.op for v in part.values}
    if ops & set(ROW_REDUCTIONS):
        return _whole_rows(part)
    if any(s.transposed for s in part.stores):
        return _transposing(part)
    min_rows, min_cols = _least(part)
    widest = SQUARE if any(map(_is_crossed, part.inputs)) else 2048
    if ops & set(WALKED):
        block_cols = max(min(_dividing(extent(part)[1]), widest, LARGEST_TILE // min_rows), min_cols)
        elements = max(8192, min_rows * block_cols)
        return _walking(part, elements // block_cols, block_cols, max(4, elements // 1024), 2 * PROCESSORS)
    block_cols = max(min(power_of_two(extent(part)[1]), widest, LARGEST_TILE // min_rows), min_cols)
    if "all_amax" in ops:
        elements = max(8192 if _read_ahead(part, 1) <= 4 else 4096, min_rows * block_cols)
        return _walking(part, elements // block_cols, block_cols, max(4, elements // 2048), 4 * PROCESSORS)
    block_rows = max(min_rows, 4096 // block_cols, 1)
    return _tiled(part, block_rows, block_cols, max(4, _warps(block_rows * block_cols, 64)))


def _is_crossed(x: Input) -> bool:
    """Return True if `x` lies in memory across the rows: tiles of several of them read what lies side by side."""
    return x.extent == ELEMENT and x.cols[-1][1] not in (0, 1)


def _whole_rows(part: Part) -> Schedule:
    """Return tiles for row reductions: whole rows, several that are held, or sweeps where registers do not hold them.

    Where an input lies across the rows, a tile has as many of them as share lines of memory, if that fits.
    Programs walk if they accumulate column sums, which few programs do best; or where each of several reductions would
    wait for the one before with nothing to load meanwhile. An amax next to a row reduction is no reason: it is reduced
    once more by a kernel of its own, which costs less.
    """
    ops = {v.op for v in part.values}
    payloads = _payloads(part)
    min_rows, min_cols = _least(part)
    cols = power_of_two(extent(part)[1])
    wide = sum(i.extent == ELEMENT for i in part.inputs) * cols
    block_cols = max(cols, min_cols)
    too_large = min_rows > 1 and 4 * min_rows * block_cols > MOST_SHARED
    if (wide > MAX_ROW or too_large) and not ops & set(WALKED):
        block_cols = max(min(2048, LARGEST_TILE // min_rows), min_cols)
        return _tiled(part, min_rows, block_cols, max(8, _warps(min_rows * block_cols, 64)), sweeps=True)
    across = min(CROSSED, LARGEST_TILE // block_cols)
    if any(map(_is_crossed, part.inputs)) and across >= SECTOR and not ops & set(WALKED):
        block_rows = max(min_rows, across)
        return _tiled(part, block_rows, block_cols, _warps(block_rows * block_cols, 32))
    if ops & set(WALKED):
        per_thread = _held_by_threads(part)
        block_rows = max(min_rows, min(16, 128 * per_thread // block_cols), 1)
        elements = block_rows * block_cols
        return _walking(
            part, block_rows, block_cols, _warps(elements, per_thread), PROCESSORS * (2 if elements <= 4096 else 1)
        )
    tile = max(_held_tile(part, wide), min_cols)
    if tile < block_cols:
        return _tiled(part, max(min_rows, 1), tile, _warps(tile, _held_elements(part, tile)), held=True)
    block_rows = max(min_rows, min(16, 1024 // block_cols), 1)
    elements = block_rows * block_cols
    if payloads > 1 and wide > MAX_ROW // 4:
        return _tiled(part, block_rows, block_cols, _warps(elements, 32 if block_cols > 8192 else 16))
    if max(part.levels) > 2 and 2048 < wide <= 4096:
        return _walking(part, block_rows, block_cols, _warps(elements, 32), 4 * PROCESSORS)
    padded = 8 * part.cols < 7 * block_cols and sum(i.extent == ELEMENT for i in part.inputs) == 1
    return _tiled(part, block_rows, block_cols, _warps(elements, 64 if padded else 32))


def _held_elements(part: Part, tile: int) -> int:
    """Return how many elements a thread has of each tile of this width of a row that is held."""
    if _payloads(part) < 2:
        return 8
    return 16 if _is_grouped(part) else {1024: 4, 2048: 16, 4096: 16}.get(tile, 8)


def _payloads(part: Part) -> int:
    return sum(v.op == "quantize" for v in part.values)


def _is_grouped(part: Part) -> bool:
    """Return True if `part` computes amaxes of groups of elements."""
    return any(v.op in GROUP_REDUCTIONS for v in part.values)


def _held_by_threads(part: Part) -> int:
    """Return how many elements of each tensor a thread may have where it sums up columns as well: what it loads, what
    it has loaded once and what it sums up stay in registers (of which it has 255)."""
    tensors = sum(i.extent in (ELEMENT, COLUMN) for i in part.inputs) + sum(v.op in PARTIALS for v in part.values)
    return 32 if tensors <= 7 else 16 if tensors <= 14 else 8


def _dividing(cols: int) -> int:
    """Return the width of the widest tile of which several cover a row closely."""
    widths = [width for width in (1024, 512) if ceil_div(cols, width) * width <= cols * 13 // 12]
    return min(power_of_two(cols), widths[0] if widths else 256)


def _held_tile(part: Part, wide: int) -> int:
    """Return the width of at most 8 tiles in which a row is held: those that together are as little wider than the row
    as may be; or the power of two above the row, where one tile of it is faster.

    wide: elements of the rows of all inputs. Several inputs, payloads and amaxes of groups leave few registers: held
    rows are faster then, whatever covers them.
    """
    cols = extent(part)[1]
    whole = power_of_two(cols)
    if whole < 512:
        return whole
    tile = min((whole >> n for n in range(4)), key=lambda width: (ceil_div(cols, width) * width, -width))
    held = 8 * ceil_div(cols, tile) * tile
    if _payloads(part) > 1 and _is_grouped(part) and wide <= MAX_ROW // 2:
        several = wide >= 2 * whole
        return tile if held <= 6 * whole else min(max(HELD, whole >> 3), whole) if several else whole
    return tile if held <= 7 * whole else whole


def _transposing(part: Part) -> Schedule:
    """Return tiles that are stored transposed, packed where that is possible; else, the more a program computes for
    an element, the fewer elements a thread has."""
    min_rows, min_cols = _least(part)
    cols = power_of_two(extent(part)[1])
    payloads = [i for i, v in enumerate(part.values) if v.op == "quantize"]
    layouts = {s.transposed for s in part.stores if s.value in payloads}
    wide = sum(i.extent == ELEMENT for i in part.inputs)
    # with amaxes of groups of rows, packed transposes took longer
    packed = packed_transpose.possible(part) and not any(v.op in packed_transpose.JOINED for v in part.values)
    if packed:
        block_rows, block_cols, per_thread = PACKED[min(len(payloads), 3)]
    elif len(payloads) > 1 or wide > 1:
        # a thread makes the scales of all groups that it has elements of: where they are many, few threads are better
        many = min_rows * min_cols >= 128 * 128 and max(len(payloads), wide) <= 2
        block_rows, block_cols, per_thread = 32, 64, 128 if many else 16
    elif layouts == {True, False}:
        block_rows, block_cols, per_thread = 64, 128, 64
    elif len(part.inputs) > 2:
        block_rows, block_cols, per_thread = 32, 128, 32
    else:
        block_rows, block_cols, per_thread = 64, 64, 32
    block_rows, block_cols = max(block_rows, min_rows), max(min(block_cols, cols), min_cols)
    warps = min(16, max(4, block_rows * block_cols // (32 * per_thread)))
    ops = {v.op for v in part.values}
    runs = RUNS_IN_ONE_PASS if "predicted_scale" in ops else RUNS
    resident = runs * PROCESSORS if ops & set(PARTIALS) else 0
    schedule = _tiled(part, block_rows, block_cols, warps, resident=resident)
    (tiling,) = schedule.tilings
    row_programs = _of_whole_lines(part, tiling) if resident else tiling.row_programs
    return replace(schedule, tilings=(replace(tiling, packed_transpose=packed, row_programs=row_programs),))


def _of_whole_lines(part: Part, tiling: Tiling) -> int:
    """Return no more programs than a tiling has, each with a power of two of tiles: so that none begins in the middle
    of what is a line of memory where it is stored transposed."""
    rows = extent(part)[0]
    if not isinstance(rows, int) or part.bands > 1:
        return tiling.row_programs
    tiles = ceil_div(rows, tiling.block_rows)
    return ceil_div(tiles, power_of_two(ceil_div(tiles, tiling.row_programs)))


def _walking(part: Part, block_rows: int, block_cols: int, warps: int, resident: int) -> Schedule:
    """Return tiles for `resident` programs that walk, a tile or two ahead of what they compute; over two tiles at
    least, where each leaves sums that are to be added up."""
    least = max(1, _least(part)[0])
    rows, cols = extent(part)
    if isinstance(rows, int):
        block_rows = min(block_rows, max(power_of_two(rows), least))
        if any(v.op in WALKED for v in part.values):
            tiles = ceil_div(rows, block_rows) * ceil_div(cols, block_cols)
            resident = max(1, min(resident, ceil_div(tiles, 2)))
    memory = SHARED_MEMORY // max(1, min(3, resident // PROCESSORS))
    while block_rows > least and 2 * _read_ahead(part, block_rows * block_cols) > memory:
        block_rows //= 2
    stages = max(1, min(3, memory // max(1, _read_ahead(part, block_rows * block_cols))))
    return _tiled(part, block_rows, block_cols, warps, stages, resident=resident)


def _read_ahead(part: Part, elements: int) -> int:
    """Return the bytes of one tile of all inputs that change from row to row: what a stage of reading ahead has in
    shared memory."""
    changing = [i for i in part.inputs if i.extent == ELEMENT and i.repeats == 1]
    return elements * sum(DTYPE_BYTES.get(i.dtype, 1) for i in changing)


def _least(part: Part) -> tuple[int, int]:
    """Return rows and columns of the smallest tile that holds whole groups, and enough elements for packed casts."""
    rows = [r for r, _ in part.extents if r > 1]
    cols = [c for _, c in part.extents if c > 1]
    return max(rows, default=1), max(cols, default=4)


def _warps(elements: int, per_thread: int) -> int:
    return min(32, max(1, power_of_two(elements // (32 * per_thread))))


def _tiled(
    part: Part,
    block_rows: int,
    block_cols: int,
    warps: int,
    stages: int = 1,
    sweeps: bool = False,
    resident: int = 0,
    held: bool = False,
) -> Schedule:
    """Return tiles of this size: one a program, or walked over by `resident` programs, as symbolic rows always are."""
    rows, cols = extent(part)
    narrow = gcd(block_cols, *part.widths)  # each tile lies in one of the inputs that are side by side
    block_rows, block_cols = block_rows * (block_cols // narrow), narrow
    col_blocks = max(1, ceil_div(cols, block_cols))
    row_programs = max(1, (resident or _all_at_a_time(warps)) // (1 if sweeps or held else col_blocks))
    if isinstance(rows, int):
        block_rows = min(block_rows, max(power_of_two(rows), _least(part)[0]))
        blocks = max(1, ceil_div(rows, block_rows))
        row_programs = min(blocks, row_programs) if resident else blocks
        block_rows, row_programs = in_bands(part, block_rows, row_programs)
    tiling = Tiling(block_rows, block_cols, row_programs, col_blocks, sweeps, held=held)
    return Schedule((tiling,), warps, stages)


def _all_at_a_time(warps: int) -> int:
    """Return how many programs run at a time, about."""
    return PROCESSORS * max(1, 32 // warps)
