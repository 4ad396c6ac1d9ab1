"""Index vectors, masks and offsets of a generated kernel: where the elements of a tile lie.

Sizes and strides that are numbers stand in the source as numbers; a mask stands only where divisibility cannot be
proven.
"""

from __future__ import annotations

from fp8compile.kernels.codegen.schedule.packed_transpose import STEP
from fp8compile.kernels.codegen.schedule.tile_layout import INT32_MAX, TileLayout, size_of
from fp8compile.kernels.codegen.source.function_draft import FunctionDraft
from fp8compile.kernels.codegen.source.statements import Assign, Expression, Name, Statement, all_of, expr, joined
from fp8compile.kernels.codegen.spec.region import Digits, Extent, Input, Size

PID = Name("pid")
BAND = Name("band")
ROW = Name("row")  # which of the tensors of a tile, each of every fourth row
ROWS = Name("rows")
ROW_BLOCK = Name("row_block")
FIRST_ROW_BLOCK = Name("first_row_block")
COL_BLOCK = Name("col_block")


class Indices:
    """Writes index vectors where they are needed first.

    dims: the dimension, 0 or 1, along which each vector runs; written: those that stand in the source.
    """

    def __init__(self, layout: TileLayout, draft: FunctionDraft) -> None:
        self.layout, self.draft = layout, draft
        self.dims: dict[Name, int] = {}
        self.written: set[Name] = set()

    def vector(self, dim: int, step: int, across: bool = False) -> Name:
        """Return the vector of row (`dim` 0) or column (1) numbers of this tile, in groups of `step`.

        Rows lie along the tile's first dimension and columns along its second; `across` turns that round.
        """
        name = Name(("rows", "cols")[dim] + (f"_by_{step}" if step > 1 else "") + ("_t" if across else ""))
        self.dims[name] = dim
        if name not in self.written:
            self.written.add(name)
            shape = "[None, :]" if (dim == 1) != across else "[:, None]"
            statements, numbers = self._numbers(dim, step, shape)
            statements.append(Assign(name, numbers))
        return name

    def _numbers(self, dim: int, step: int, shape: str) -> tuple[list[Statement], Expression]:
        """Return where the vector of row or column numbers is written, and what it is."""
        tiling = self.layout.tiling
        block = self.layout.block[dim] // step
        numbers = expr(f"tl.arange(0, {block}){shape}")
        if dim == 1:
            columns = expr("{} * {} + {}", COL_BLOCK, block, numbers) if tiling.col_blocks > 1 else numbers
            return self._of_columns(), columns
        if tiling.packed_transpose and step == 1:
            return self.draft.tile, expr("{} + {}", self.rows_of_first(), ROW)
        return self.draft.body, expr("{} * {} + {}", ROW_BLOCK, block, numbers)

    def rows_of_first(self) -> Expression:
        """Return the rows of the first tensor of a tile, which has every fourth row of it."""
        block = self.layout.tiling.block_rows
        return expr(f"{{}} * {block} + {STEP} * tl.arange(0, {block // STEP})[:, None]", ROW_BLOCK)

    def argument(self, x: Input) -> Name:
        """Return where an input begins: of several side by side, the one that has the columns of this tile."""
        if not x.beside:
            return Name(f"x{x.tensor}")
        names = [Name(f"x{t}") for t in x.tensors]
        blocks = self.layout.part.cols // len(names) // self.layout.tiling.block_cols
        found: Expression = names[-1]
        for n in reversed(range(len(names) - 1)):
            found = expr("tl.where({} < {}, {}, {})", COL_BLOCK, (n + 1) * blocks, names[n], found)
        return self._once(Name("_or_".join(f"x{t}" for t in x.tensors)), found)

    def columns_of(self, x: Input) -> Name:
        """Return the vector of the numbers that this tile's columns have in one of several inputs side by side."""
        width = self.layout.part.cols // len(x.tensors)
        return self._once(Name(f"cols_of_{width}"), expr(f"{{}} % {width}", self.vector(1, 1)))

    def _once(self, name: Name, what: Expression) -> Name:
        """Return `name` of what depends on the columns of a tile alone, and is written where they are."""
        self.dims[name] = 1
        if name not in self.written:
            self.written.add(name)
            self._of_columns().append(Assign(name, what))
        return name

    def _of_columns(self) -> list[Statement]:
        """Return where the numbers of a tile's columns are written."""
        return self.draft.tile if self.layout.tiling.owns_rows else self.draft.before

    def pointer(self, buffer: int, dtype: str) -> Name:
        """Return where a buffer begins; of one in FP8, as bytes."""
        name = Name(f"y{buffer}")
        if not dtype.startswith("float8"):
            return name
        pointer = Name(f"y{buffer}_bytes")
        cast = Assign(pointer, expr("{}.to(tl.pointer_type(tl.uint8), bitcast=True)", name))
        self.draft.add_once(self.draft.before, cast)
        return pointer

    def mask(self, extent: Extent, across: bool = False, multiples: tuple[int, int] = (1, 1)) -> Expression | None:
        """Return the condition under which an element of this extent exists (None: always), or is a zero appended to
        fill up `multiples` of rows and columns."""
        limits = [self.layout.limit(d, step, multiples[d]) if step else None for d, step in enumerate(extent)]
        return all_of(
            *(
                expr("({} < {})", self.vector(dim, extent[dim], across), limit)
                for dim, limit in enumerate(limits)
                if limit is not None
            )
        )


def address_terms(axis: Expression, digits: Digits) -> list[Expression]:
    """Return the terms of Σ digit · stride for the numbers in vector `axis`, in 64 bits where 32 may not hold them."""
    return index_terms(expr("{}.to(tl.int64)", axis) if _is_wide(digits) else axis, digits)


def index_terms(axis: Expression, digits: Digits) -> list[Expression]:
    """Return the terms of Σ digit · stride for the numbers in vector `axis`."""
    terms: list[Expression] = []
    inner: list[Size] = []
    for n, (size, stride) in enumerate(reversed(digits)):
        outermost = n == len(digits) - 1
        if stride != 0:
            digit = expr("({} // {})", axis, _product(inner)) if inner else axis
            if not outermost:
                digit = expr("({} % {})", digit, size_of(size))
            terms.append(digit if stride == 1 else expr("{} * {}", digit, size_of(stride)))
        inner.append(size)
    return terms[::-1]


def _is_wide(digits: Digits) -> bool:
    reach = 0
    for size, stride in digits:
        if isinstance(stride, str) or (isinstance(size, str) and stride != 0):
            return True
        reach += (int(size) - 1) * stride if stride else 0
    return reach > INT32_MAX


def _product(sizes: list[Size]) -> Expression:
    known = 1
    factors: list[Expression] = []
    for size in sizes:
        if isinstance(size, int):
            known *= size
        else:
            factors.append(Name(size))
    if known > 1 or not factors:
        factors.append(expr(str(known)))
    return factors[0] if len(factors) == 1 else expr("({})", joined(" * ", factors))
