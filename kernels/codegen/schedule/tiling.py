"""The schedule of a generated kernel: how its parts are cut into tiles and programs, and nothing of what they compute.

Three shapes, one form: a program owns a tile of block_rows × block_cols and walks down the rows, row_programs tiles at
a time. Whole rows in one tile (block_cols ≥ cols) serve row reductions in a single pass; smaller tiles serve the rest;
few programs that walk serve what a program accumulates (column sums, amaxes) or needs first (an amax of partials).
Which one a region gets is chosen by `kernels/codegen/schedule/choose_schedule.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.codegen.spec.region import Part, Size

JSON_NAMES = {"packed_transpose": "quarters"}  # field -> its name in JSON, of which kernels' names are made


@dataclass(frozen=True)
class Tiling:
    """The tiles of a part: block_rows × block_cols (powers of two), row_programs × col_blocks of them side by side.

    A program may own all tiles of its rows: with `sweeps` it reads them once for each reduction along the rows, `held`
    it reads them once and has them until it stores (`kernels/codegen/emit/held_rows.py`).
    With `packed_transpose` (`kernels/codegen/schedule/packed_transpose.py`) every fourth row of a tile is a tensor of
    its own.
    """

    block_rows: int
    block_cols: int
    row_programs: int
    col_blocks: int
    sweeps: bool = False
    packed_transpose: bool = False
    held: bool = False

    @property
    def owns_rows(self) -> bool:
        """True if a program has all tiles of its rows."""
        return self.sweeps or self.held

    @property
    def manner(self) -> str:
        """The words for it in a kernel's header, beside the sizes of its tiles."""
        if self.sweeps or self.held:
            return " in sweeps" if self.sweeps else " held"
        return " in quarters" if self.packed_transpose else ""

    @property
    def programs(self) -> int:
        """The number of programs of the part."""
        return self.row_programs * (1 if self.owns_rows else self.col_blocks)


@dataclass(frozen=True)
class Schedule:
    """A tiling for each part of a region; all parts run with the same number of warps.

    `stages`: how many tiles ahead a walking program reads (1: none).
    """

    tilings: tuple[Tiling, ...]
    warps: int = 4
    stages: int = 1

    @property
    def programs(self) -> int:
        """The size of the launch grid."""
        return sum(t.programs for t in self.tilings)

    @property
    def elements_a_thread(self) -> int:
        """The number of elements of each tensor that a thread has at a time, in the part where it has most."""
        held = max(t.block_rows * t.block_cols * (t.col_blocks if t.held else 1) for t in self.tilings)
        return ceil_div(held, 32 * self.warps)

    def to_json(self) -> str:
        """Return it as text, for `from_json`."""
        tilings = [{JSON_NAMES.get(k, k): v for k, v in asdict(t).items()} for t in self.tilings]
        return json.dumps(asdict(self) | {"tilings": tilings}, separators=(",", ":"))


def from_json(text: str) -> Schedule:
    """Return the `Schedule` written as `text`."""
    data: dict[str, Any] = json.loads(text)
    names: dict[str, str] = {there: here for here, there in JSON_NAMES.items()}
    tilings = tuple(Tiling(**{names.get(str(k), str(k)): v for k, v in t.items()}) for t in data["tilings"])
    return Schedule(tilings, data["warps"], data["stages"])


def resolve(dim: Any, sizes: dict[str, Any], schedule: Schedule) -> Any:
    """Return a dimension of a `Buffer` as a number (or symbolic size)."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, tuple):
        return round_up(resolve(dim[0], sizes, schedule), dim[1])
    if dim.startswith("row_programs"):
        return schedule.tilings[int(dim.removeprefix("row_programs"))].row_programs
    if dim.startswith("programs"):
        return schedule.tilings[int(dim.removeprefix("programs"))].programs
    return sizes[dim]


def in_bands(part: Part, block_rows: int, row_programs: int) -> tuple[int, int]:
    """Return (rows of a tile, programs) near to these: rows that divide a band, and equally many programs a band."""
    if part.bands == 1:
        return block_rows, row_programs
    assert isinstance(part.rows, int), "bands are of rows that are known"
    rows = part.rows // part.bands
    block_rows = min(block_rows, rows & -rows)
    return block_rows, part.bands * min(rows // block_rows, max(1, row_programs // part.bands))


def extent(part: Part) -> tuple[Size, int]:
    """Return how many rows and columns tiles cover, with the zeros that stores append."""
    row_multiple = max((s.row_multiple for s in part.stores), default=1)
    col_multiple = max((s.col_multiple for s in part.stores), default=1)
    rows = round_up(part.rows, row_multiple) if isinstance(part.rows, int) else part.rows
    return rows, round_up(part.cols, col_multiple)


def power_of_two(n: int) -> int:
    """Return the least power of two ≥ n."""
    return 1 << max(0, n - 1).bit_length()
