"""Where the elements of a tile lie: index vectors, masks and offsets of a generated kernel, as Triton source.

Sizes and strides that are numbers stand in the source as numbers; a mask stands only where divisibility cannot be
proven.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.codegen import packed_transpose
from fp8compile.kernels.codegen import schedule as schedules
from fp8compile.kernels.codegen.schedule import Tiling
from fp8compile.kernels.codegen.spec import Digits, Extent, Input, Part, Region, Size

INT32_MAX = 2**31 - 1


@dataclass
class Tile:
    """The tiles of one part: where its elements are, and the lines of source in which that is said.

    before: lines for what is the same for all tiles; body: for each tile (where a program owns rows: for each row);
    tile: for each tile of a row that it owns, or each quarter; after: for what a program has found.
    """

    region: Region
    part: Part
    tiling: Tiling
    target: str
    stages: int = 1
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows_covered, self.cols_covered = schedules.extent(self.part)
        rows, tiling = self.rows_covered, self.tiling
        self.row_blocks = max(1, ceil_div(rows, tiling.block_rows)) if isinstance(rows, int) else None
        self.loops = self.row_blocks is None or self.row_blocks > tiling.row_programs
        self.sweeps = tiling.sweeps
        self.owns_rows = tiling.owns_rows
        bands = self.part.bands if self.loops else 1
        self.band_rows = self.part.rows // bands if bands > 1 else 0  # type: ignore[operator]  # 0: no bands
        self.steps = (
            packed_transpose.STEP if tiling.quarters else 1,
            1,
        )  # rows and columns from one of a tensor to the next
        self.before: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self.tile: list[str] = [] if self.owns_rows or tiling.quarters else self.body
        self.axes: set[str] = set()  # index vectors that stand in the source

    def _shape(self, extent: Extent) -> list[int]:
        blocks = (self.tiling.block_rows, self.tiling.block_cols)
        return [blocks[d] // max(extent[d], self.steps[d]) if extent[d] else 1 for d in (0, 1)]

    def _axis(self, dim: int, step: int, across: bool = False) -> str:
        """The name of the vector of row (dim 0) or column (dim 1) numbers, in groups of `step`, of this tile.

        Rows lie along the tile's first dimension and columns along its second; `across` turns that round.
        """
        name = ("rows", "cols")[dim] + (f"_by_{step}" if step > 1 else "") + ("_t" if across else "")
        if name not in self.axes:
            self.axes.add(name)
            block = (self.tiling.block_rows, self.tiling.block_cols)[dim] // step
            shape = "[None, :]" if (dim == 1) != across else "[:, None]"
            arange = f"tl.arange(0, {block}){shape}"
            if dim == 0:
                lines, text = self._rows(step, f"row_block * {block} + {arange}")
                lines.append(f"{name} = {text}")
            else:
                start = f"col_block * {block} + " if self.tiling.col_blocks > 1 else ""
                (self.tile if self.owns_rows else self.before).append(f"{name} = {start}{arange}")
        return name

    def _rows(self, step: int, numbers: str) -> tuple[list[str], str]:
        """Where the vector of row numbers, in groups of `step`, is written, and what it is."""
        return self.body, numbers

    def _alike(self, spec: Input) -> int:
        """How many rows, all of a program's band or all of a tile, read the same of an input that varies by rows; 0 if
        not even those of a tile do."""
        if spec.extent[0] != 1 or self._limit(0, 1, 1):
            return 0
        sizes = (self.band_rows, self.tiling.block_rows)
        return next((rows for rows in sizes if rows > 1 and spec.repeats % rows == 0), 0)

    def _mask(self, extent: Extent, across: bool = False, multiples: tuple[int, int] = (1, 1)) -> str:
        """The condition under which an element of this extent exists ("" if always), or is a zero appended to fill up
        `multiples` of rows and columns."""
        terms = []
        for dim, step in enumerate(extent):
            limit = self._limit(dim, step, multiples[dim]) if step else ""
            if limit:
                terms.append(f"({self._axis(dim, step, across)} < {limit})")
        return " & ".join(terms)

    def _limit(self, dim: int, step: int, multiple: int) -> str:
        """How many rows or columns, in groups of `step`, there are; "" if all that the tiles cover are."""
        block = (self.tiling.block_rows, self.tiling.block_cols)[dim]
        total: Size = (self.part.rows, self.part.cols)[dim]
        if isinstance(total, str):
            if all(self.part.row_divisor % n == 0 for n in (block, *(s.row_multiple for s in self.part.stores))):
                return ""
            padded = f"(tl.cdiv({total}, {multiple}) * {multiple})" if multiple > 1 else total
            return padded if step == 1 else f"tl.cdiv({padded}, {step})"
        blocks = self.row_blocks if dim == 0 else self.tiling.col_blocks
        limit = ceil_div(round_up(total, multiple), step)
        return "" if blocks is not None and limit * step == blocks * block else str(limit)

    def _index(self, axis: str, digits: Digits, wide: bool) -> list[str]:
        """Terms of Σ digit · stride for the number in vector `axis`."""
        if wide and digits:
            axis = f"{axis}.to(tl.int64)"
        terms, inner = [], []
        for n, (size, stride) in enumerate(reversed(digits)):
            outermost = n == len(digits) - 1
            if stride != 0:
                digit = axis if not inner else f"({axis} // {_product(inner)})"
                if not outermost:
                    digit = f"({digit} % {size})"
                terms.append(digit if stride == 1 else f"{digit} * {stride}")
            inner.append(size)
        return terms[::-1]

    def _is_wide(self, digits: Digits) -> bool:
        reach = 0
        for size, stride in digits:
            if isinstance(stride, str) or (isinstance(size, str) and stride != 0):
                return True
            reach += (int(size) - 1) * stride if stride else 0
        return reach > INT32_MAX


def _product(sizes: list[Size]) -> str:
    known = 1
    names = []
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            names.append(size)
    text = " * ".join([*names, *([str(known)] if known > 1 or not names else [])])
    return f"({text})" if " " in text else text
