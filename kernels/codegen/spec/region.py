"""The spec of a generated kernel: what it computes, and nothing of how (that is `kernels/codegen/schedule/tiling.py`).

A `Region` is one kernel. It has one or several independent `Part`s, each an expression graph over an iteration space of
rows × cols: inputs say where element (r, c) lies in memory, values how it is computed, stores where it goes.

    value  = op(earlier values)                 every value is FP32 or bool in registers, rounded only when it is stored
    extent = (1, 1) an element · (1, 0) a row · (0, 1) a column · (0, 0) one number · (1, g), (g, 1), (b, b) a group

A `Size` is a number, or a name: "n0", "n1", … come with the call (symbolic sizes of dynamic shapes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

Size = int | str  # a name stands for a number that comes with the call: see `number_of`
Digits = tuple[tuple[Size, Size], ...]  # (size, stride) of the loops that make up an index, outermost first
Extent = tuple[int, int]
ELEMENT, ROW, COLUMN, NUMBER = (1, 1), (1, 0), (0, 1), (0, 0)
MOST_BESIDE = 4  # arguments that have their columns side by side: each tile asks which is its own


def number_of(size: Size, sizes: Mapping[str, int]) -> int:
    """Return `size` as a number, given those of the names."""
    return size if isinstance(size, int) else sizes[size]


@dataclass(frozen=True)
class Input:
    """A place for element (r, c) in argument `tensor`: offset + Σ digits of r · stride + Σ digits of c · stride.

    beside: further arguments, laid out alike, of which each holds as many columns beside the last of the one before;
    `cols` are then those of one of them.
    """

    tensor: int
    dtype: str
    rows: Digits
    cols: Digits
    offset: int = 0
    beside: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[int, ...]:
        """The arguments that it reads."""
        return self.tensor, *self.beside

    def renumbered(self, new: Callable[[int], int]) -> Input:
        """Return it with other numbers of its arguments."""
        return replace(self, tensor=new(self.tensor), beside=tuple(map(new, self.beside)))

    @property
    def extent(self) -> Extent:
        """Along which loops it varies; a col group where the innermost loop over columns does not move."""
        return _varies(self.rows), _varies(self.cols)

    @property
    def repeats(self) -> int:
        """The number of rows after each other that read the same, as far as is known: those of an image, say."""
        count = 1
        for size, stride in reversed(self.rows):
            if stride != 0 or isinstance(size, str):
                break
            count *= size
        return count

    def reach(self, sizes: Mapping[str, int]) -> int:
        """Return one more than the last element that is read of the tensor; 0 if none is."""
        digits = [(number_of(n, sizes), number_of(stride, sizes)) for n, stride in (*self.rows, *self.cols)]
        return 0 if any(n == 0 for n, _ in digits) else self.offset + 1 + sum((n - 1) * s for n, s in digits)


def _varies(digits: Digits) -> int:
    if all(stride == 0 for _, stride in digits):
        return 0
    size, stride = digits[-1]
    return size if stride == 0 and isinstance(size, int) and size & (size - 1) == 0 else 1


@dataclass(frozen=True)
class Value:
    """`op` of earlier values (their positions), with parameters that are no values: a constant, a format, a size."""

    op: str
    args: tuple[int, ...] = ()
    params: tuple[Any, ...] = ()


def reached(
    values: Sequence[Value], starts: Iterable[int], through: Callable[[Value], bool] = lambda _: True
) -> set[int]:
    """Return the values of which `starts` are made, themselves included; not those of one for which `through` is
    False."""
    found: set[int] = set()
    stack = list(starts)
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack += values[i].args if through(values[i]) else ()
    return found


@dataclass(frozen=True)
class Store:
    """Value → buffer[offset + r·lead + c], or [offset + c·lead + r] if transposed, r and c counted in its extent.

    `row_multiple` and `col_multiple` continue the iteration space with zeros up to multiples of them, also where the
    value itself does not vary (`Part.stored_extent`). A store of `partial` kind keeps what each program found: the
    values of all programs together are the result. A lead that is a name, of a transposed store, is that of the rows,
    rounded up; an offset that is one, of a multiple of the lead.
    """

    buffer: int
    value: int
    lead: Size = 1
    offset: Size = 0
    transposed: bool = False
    row_multiple: int = 1
    col_multiple: int = 1


@dataclass(frozen=True)
class Part:
    """An expression graph over rows × cols. `rows` is known to be a multiple of `row_divisor`.

    only_if: the value, a number, without which nothing but numbers is stored; None where all is.
    """

    rows: Size
    cols: int
    inputs: tuple[Input, ...]
    values: tuple[Value, ...]
    stores: tuple[Store, ...]
    row_divisor: int = 1
    only_if: int | None = None

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The extent of each value."""
        extents: list[Extent] = []
        for value in self.values:
            extents.append(_extent(value, self.inputs, [extents[a] for a in value.args]))
        return tuple(extents)

    @cached_property
    def widths(self) -> frozenset[int]:
        """The columns of one argument, for each count of arguments that have their columns side by side."""
        return frozenset(self.cols // len(i.tensors) for i in self.inputs if i.beside)

    def stored_extent(self, store: Store) -> Extent:
        """Return along which loops `store` writes: where its value varies, and element by element where it appends
        zeros. A value of the only row does not vary along the rows; the zeros below it are written all the same."""
        rows, cols = self.extents[store.value]
        return rows or int(store.row_multiple > 1), cols or int(store.col_multiple > 1)

    @cached_property
    def bands(self) -> int:
        """The number of equal bands of rows, of which each has a column sum; no program has rows of two."""
        return max((v.params[0] for v in self.values if v.op == "col_sum" and v.params), default=1)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The number of row reductions, one after the other, that each value needs."""
        levels: list[int] = []
        for value in self.values:
            levels.append(max((levels[a] for a in value.args), default=0) + (value.op in ROW_REDUCTIONS))
        return tuple(levels)


ROW_REDUCTIONS = ("row_sum", "row_max", "row_min", "row_amax")
# Amaxes of groups of params[0] elements: op -> True where a group takes several rows, several columns.
GROUP_REDUCTIONS = {"group_amax": (False, True), "col_group_amax": (True, False), "block_amax": (True, True)}
BAND = 128  # the rows of a band are a multiple of it, so that tiles fill them, whatever groups of rows they hold
PARTIALS = ("all_amax", "col_sum", "col_amax")  # one result a program; what reads them reduces once more


def _extent(value: Value, inputs: tuple[Input, ...], args: list[Extent]) -> Extent:
    if value.op == "load":
        return inputs[value.params[0]].extent
    if value.op in ("constant", "load_max"):
        return NUMBER
    if value.op == "random":
        return ELEMENT
    if value.op in ROW_REDUCTIONS:
        return ROW
    if value.op in GROUP_REDUCTIONS:
        down, across = GROUP_REDUCTIONS[value.op]
        return value.params[0] if down else 1, value.params[0] if across else 1
    if value.op == "all_amax":
        return NUMBER
    if value.op in ("col_sum", "col_amax"):
        return COLUMN
    return join(args)


def join(extents: Iterable[Extent]) -> Extent:
    """Return the extent of something computed element by element: it varies wherever an argument does."""
    rows, cols = zip(*extents, strict=True)
    return _finest(rows), _finest(cols)


def _finest(steps: Iterable[int]) -> int:
    return min((s for s in steps if s), default=0)


@dataclass(frozen=True)
class Buffer:
    """An output of the kernel. A dimension is a size, (size, multiple) for one rounded up, or a count of programs."""

    shape: tuple[Any, ...]
    dtype: str


@dataclass(frozen=True)
class Region:
    """One kernel: parts that run side by side, the buffers they fill, and the user's lines they come from.

    `strides`: those of each argument for which the inputs were made, if they are known.
    """

    parts: tuple[Part, ...]
    buffers: tuple[Buffer, ...]
    origins: tuple[str, ...] = ()
    strides: tuple[tuple[Size, ...], ...] = ()

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes that come with the call, in order."""
        found: dict[str, None] = {}
        shapes = (d[0] if isinstance(d, tuple) else d for b in self.buffers for d in b.shape)
        strides = (s for tensor in self.strides for s in tensor)
        for size in (*(s for part in self.parts for s in _sizes_of(part)), *shapes, *strides):
            if isinstance(size, str) and "programs" not in size:
                found[size] = None
        return tuple(sorted(found, key=lambda name: int(name[1:])))

    @cached_property
    def tensors(self) -> int:
        """The number of its tensor arguments."""
        return 1 + max((t for part in self.parts for i in part.inputs for t in i.tensors), default=-1)

    def to_json(self) -> str:
        """Return it as text, for `from_json`; equal regions have equal texts."""
        return json.dumps(self, default=_as_dict, separators=(",", ":"))


def _as_dict(x: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as `asdict` does, without copying all that is in it; not what few have."""
    return {
        f.name: field for f in fields(x) if (field := getattr(x, f.name)) is not None and (field or f.name != "beside")
    }


def _sizes_of(part: Part) -> Iterable[Size]:
    yield part.rows
    for i in part.inputs:
        for size, stride in (*i.rows, *i.cols):
            yield size
            yield stride
    for store in part.stores:
        yield store.lead
        yield store.offset


@lru_cache(maxsize=4096)
def from_json(text: str) -> Region:
    """Return the `Region` written as `text`."""
    data = json.loads(text)
    return Region(
        parts=tuple(_part(p) for p in data["parts"]),
        buffers=tuple(Buffer(_tuples(b["shape"]), b["dtype"]) for b in data["buffers"]),
        origins=tuple(data["origins"]),
        strides=_tuples(data["strides"]),
    )


def _part(data: dict[str, Any]) -> Part:
    return Part(
        rows=data["rows"],
        cols=data["cols"],
        row_divisor=data["row_divisor"],
        only_if=data.get("only_if"),
        inputs=tuple(Input(**{name: _tuples(x) for name, x in i.items()}) for i in data["inputs"]),
        values=tuple(Value(v["op"], tuple(v["args"]), _tuples(v["params"])) for v in data["values"]),
        stores=tuple(Store(**s) for s in data["stores"]),
    )


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
