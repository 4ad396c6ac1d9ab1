"""The values of a part: expressions over rows × cols, each once, however often it is asked for.

A `Values` is what the table of `fusible` writes with. A value has a number; in the end those are left that something
stored needs, numbered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.region import ROW_REDUCTIONS, Digits, Input, Part, Store, Value, reached
from fp8compile.passes.core.iteration import Size, divides

DIVISORS = (128, 64, 32, 16, 8, 4, 2, 1)
LONGEST_GROUP = 128  # of scales; a tile holds whole groups


class RefusedError(Exception):
    """A region cannot compute this; the message says why."""


@dataclass
class Values:
    """The values of a part over rows × cols, and what it loads."""

    rows: Size
    cols: int
    sizes: list[Any] = field(default_factory=list)  # symbolic ones, which a kernel takes as arguments

    def __post_init__(self) -> None:
        self.inputs: list[Input] = []
        self.items: list[Value] = []
        self.bools: set[int] = set()
        self._known: dict[Any, int] = {}

    def number(self, size: Size) -> int | str:
        """Return a size as a spec writes it: a number, or the name of an argument."""
        if isinstance(size, int):
            return size
        for n, known in enumerate(self.sizes):
            if str(known) == str(size):
                return f"n{n}"
        self.sizes.append(size)
        return f"n{len(self.sizes) - 1}"

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """Add a value computed from others, and return its number."""
        computed = OPERATIONS.get(name)  # None: a reduction
        takes_bools = computed is not None and computed.takes_bools
        if takes_bools and not all(a in self.bools for a in args):
            raise RefusedError("a bitwise operation on numbers")
        if not takes_bools and name != "float":
            args = tuple(self._as_float(a) if n or name != "where" else a for n, a in enumerate(args))
        one = self.constant(1.0) if name == "div" else None
        if (
            one is not None
            and args[0] != one
            and (inverse := self._known.get(Value("div", (one, args[1])))) is not None
        ):
            name, args = "mul", (args[0], inverse)  # one division for all by the same
        i = self.add(Value(name, args, params))
        if computed is not None and computed.gives_bool:
            self.bools.add(i)
        return i

    def constant(self, x: Any) -> int:
        """Add a constant, and return the number of that value."""
        return self.add(Value("constant", (), (float(x),)))

    def _as_float(self, i: int) -> int:
        return self.add(Value("float", (i,))) if i in self.bools else i

    def add(self, item: Value) -> int:
        """Add this value, which may be there already, and return its number."""
        if item not in self._known:
            self._known[item] = len(self.items)
            self.items.append(item)
        return self._known[item]

    def load(self, item: Input) -> int:
        """Add what is loaded from memory, and return the number of that value."""
        if item not in self.inputs:
            self.inputs.append(item)
        i = self.add(Value("load", (), (self.inputs.index(item),)))
        if item.dtype == "bool":
            self.bools.add(i)
        return i

    def converted(self, i: int, dtype: torch.dtype) -> int:
        """Return value `i` as this dtype has it."""
        if dtype == torch.bool:
            return i if i in self.bools else self.to_bool(i)
        return self.rounded(self._as_float(i), dtype)

    def rounded(self, i: int, dtype: torch.dtype) -> int:
        """Return value `i` as it is stored. Values stay FP32 until they are stored. But what is too large for FP16
        becomes inf, which a loss scaler must see."""
        return self.op("round", i, params=("float16",)) if dtype == torch.float16 else i

    def to_bool(self, i: int) -> int:
        """Return True if value `i` is not zero."""
        return self.op("ne", i, self.constant(0.0))

    def power(self, x: int, exponent: float) -> int:
        """Return one of the powers that `fusible` lets through."""
        square = self.op("mul", x, x) if exponent in (2, 3, 4) else x
        if exponent == 3:
            return self.op("mul", square, x)
        if exponent == 4:
            return self.op("mul", square, square)
        name = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
        return self.op(name, x) if name else square

    def row_mean(self, source: int) -> int:
        """Return the mean of each row."""
        return self.op("div", self.op("row_sum", source), self.constant(self.cols))

    # ---- what the part is in the end ----------------------------------------------------------------------------

    def stored(self, i: int, cols: Size | None = None) -> int:
        """Return value `i`, which is to be stored element by element. Raises `RefusedError` for one that repeats along
        rows or columns, as an expanded gradient does: a store has the extent of its value."""
        part = Part(self.number(self.rows), self.cols, tuple(self.inputs), tuple(self.items), ())
        sizes = (self.rows, self.cols if cols is None else cols)
        if any(step != 1 and size != 1 for step, size in zip(part.extents[i], sizes, strict=True)):
            raise RefusedError("it repeats along rows or columns")
        return i

    def part(self, stores: Sequence[Store]) -> tuple[Part, list[int]]:
        """Return the spec of all that `stores` need, and which tensors that reads, in the order of its arguments."""
        self._fold_sigmoids(stores)
        needed = self._needed(stores)
        new = {old: n for n, old in enumerate(needed)}
        loads = [self.items[i].params[0] for i in needed if self.items[i].op == "load"]
        inputs = sorted(set(loads))
        tensors = sorted({self.inputs[i].tensor for i in inputs})
        values = tuple(self._renumbered(self.items[i], new, inputs) for i in needed)
        # whole rows are wide enough: a tile of many of them at a time would be more than a program can hold
        high = 1 if any(v.op in ROW_REDUCTIONS for v in values) else LONGEST_GROUP
        part = Part(
            self.number(self.rows),
            self.cols,
            tuple(
                replace(x, tensor=tensors.index(x.tensor), rows=_ungrouped(x.rows, high), cols=_ungrouped(x.cols))
                for x in (self.inputs[i] for i in inputs)
            ),
            values,
            tuple(replace(s, buffer=n, value=new[s.value]) for n, s in enumerate(stores)),
            next(d for d in DIVISORS if divides(d, self.rows)),
        )
        return part, tensors

    def _needed(self, stores: Sequence[Store]) -> list[int]:
        return sorted(reached(self.items, (s.value for s in stores)))

    def _fold_sigmoids(self, stores: Sequence[Store]) -> None:
        """Merge 1 + tanh(x) and 1 + erf(x) into one operation each, where nothing else needs the tanh or erf (GELU's):
        half the instructions."""
        needed = [self.items[i] for i in self._needed(stores)]
        one = self._known.get(Value("constant", (), (1.0,)))
        for i, item in enumerate(self.items):
            if item.op == "add" and one in item.args and item.args != (one, one):
                other = next(a for a in item.args if a != one)
                name, args = self.items[other].op, self.items[other].args
                if name in ("tanh", "erf") and sum(v.args.count(other) for v in needed) == 1:
                    self.items[i] = Value(f"one_plus_{name}", args)

    def _renumbered(self, value: Value, new: dict[int, int], inputs: list[int]) -> Value:
        params = (inputs.index(value.params[0]),) if value.op == "load" else value.params
        return Value(value.op, tuple(new[a] for a in value.args), params)


def _ungrouped(digits: Digits, longest: int = LONGEST_GROUP) -> Digits:
    """Return the same places, as one each: where `digits` repeat each more often than `longest`, as what belongs to an
    image does in all its rows. Loops of one step behind them say so (`Input.extent`)."""
    if not digits or all(stride == 0 for _, stride in digits):
        return digits
    size, stride = digits[-1]
    repeats = stride == 0 and isinstance(size, int) and size > longest
    return (*digits, (1, 0)) if repeats else digits
