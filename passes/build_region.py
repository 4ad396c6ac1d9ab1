"""From nodes of a graph to the spec of a part: the expression graph over rows × cols that computes them.

A `Builder` is asked for nodes ("sinks") that the region shall compute, walks up from them as far as the operators are
fusible, and stops at leaves: what lies in memory already. The same node under two accesses is two values; under one it
is one value, however often it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES, Granularity, parse_granularity
from fp8compile.kernels.spec import Buffer, Digits, Input, Part, Store, Value
from fp8compile.passes import fusible
from fp8compile.passes.compilation import aten, value
from fp8compile.passes.iteration import (
    Access,
    NoAccessError,
    Size,
    broadcast,
    divides,
    equal,
    in_memory,
    of_rows,
    permuted,
    same,
    split,
    whole,
)  # fmt: skip

LOADABLE = {*fusible.FLOATS, torch.bool, *FP8_DTYPES}
DEEPEST = 100  # operators one after another that a region computes: each is a few calls of Python deep
DIVISORS = (128, 64, 32, 16, 8, 4, 2, 1)


class RefusedError(Exception):
    """A region cannot compute this; the message says why."""


@dataclass(frozen=True)
class CastLayout:
    """How a marker sees its tensor: granularity, orientation, and to what its rows and columns are filled up."""

    granularity: Granularity
    transpose: bool = False
    row_multiple: int = 1
    col_multiple: int = 1

    @staticmethod
    def of(node: fx.Node) -> CastLayout:
        """From the arguments of an amax or a quantize."""
        first = 1 if node.target is ops.amax else 3
        granularity, *layout = node.args[first:]
        return CastLayout(parse_granularity(granularity), *layout)  # type: ignore[arg-type]

    def scale_access(self, access: Access, shape: list[Size]) -> Access:
        """The access to the scale of data with this shape, given that to the data (as the marker orients it)."""
        *batch, rows, cols = shape
        kind, size = self.granularity.kind, self.granularity.size
        if kind == "tensor":
            return ()
        if kind == "row":
            return broadcast(access, shape, [*batch, rows, 1])
        if not divides(size, cols) or (kind == "block" and not divides(size, rows)):
            raise NoAccessError(f"{self.granularity} does not divide {shape}")
        if kind == "group":
            return broadcast(access, [*batch, rows, cols // size, size], [*batch, rows, cols // size, 1])
        blocked = [*batch, rows // size, size, cols // size, size]
        return broadcast(access, blocked, [*batch, rows // size, 1, cols // size, 1])


@dataclass
class Sink:
    """A node that a region computes, and where its value goes."""

    node: fx.Node
    store: Store
    buffer: Buffer


@dataclass
class Builder:
    """Writes one part. `is_leaf(node)` says which fusible nodes shall be loaded all the same."""

    rows: Size
    cols: int
    is_leaf: Callable[[fx.Node], bool]
    tensors: list[fx.Node] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    interior: set[fx.Node] = field(default_factory=set)
    sinks: list[Sink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inputs: list[Input] = []
        self._values: list[Value] = []
        self._bools: set[int] = set()
        self._known: dict[Any, int] = {}
        self._depth = 0
        self.everything = whole(self.rows, self.cols)
        self.each_row = of_rows(self.rows, self.cols)

    # ---- what the part is in the end ----------------------------------------------------------------------------

    def part(self) -> tuple[Part, list[fx.Node]]:
        """The spec of all that the sinks need, and the tensors that it reads, in the order of its arguments."""
        self._fold_sigmoids()
        needed = self._needed()
        new = {old: n for n, old in enumerate(needed)}
        loads = [self._values[i].params[0] for i in needed if self._values[i].op == "load"]
        inputs = sorted(set(loads))
        tensors = sorted({self._inputs[i].tensor for i in inputs})
        values = tuple(self._renumbered(self._values[i], new, inputs) for i in needed)
        stores = tuple(replace(s.store, buffer=n, value=new[s.store.value]) for n, s in enumerate(self.sinks))
        part = Part(
            self.number(self.rows),
            self.cols,
            tuple(replace(self._inputs[i], tensor=tensors.index(self._inputs[i].tensor)) for i in inputs),
            values,
            stores,
            next(d for d in DIVISORS if divides(d, self.rows)),
        )
        return part, [self.tensors[t] for t in tensors]

    def stored(self, i: int, cols: Size | None = None) -> int:
        """Value `i`, which is to be stored element by element. Raises `RefusedError` for one that repeats along rows or
        columns, as an expanded gradient does: a store has the extent of its value."""
        part = Part(self.number(self.rows), self.cols, tuple(self._inputs), tuple(self._values), ())
        sizes = (self.rows, self.cols if cols is None else cols)
        if any(step != 1 and size != 1 for step, size in zip(part.extents[i], sizes, strict=True)):
            raise RefusedError("it repeats along rows or columns")
        return i

    def _needed(self) -> list[int]:
        found: set[int] = set()
        stack = [s.store.value for s in self.sinks]
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += self._values[i].args
        return sorted(found)

    def _fold_sigmoids(self) -> None:
        """1 + tanh(x) and 1 + erf(x), where nothing else needs the tanh or erf (GELU's): half the instructions."""
        needed = [self._values[i] for i in self._needed()]
        one = self._known.get(Value("constant", (), (1.0,)))
        for i, item in enumerate(self._values):
            if item.op == "add" and one in item.args and item.args != (one, one):
                other = next(a for a in item.args if a != one)
                name, args = self._values[other].op, self._values[other].args
                if name in ("tanh", "erf") and sum(v.args.count(other) for v in needed) == 1:
                    self._values[i] = Value(f"one_plus_{name}", args)

    def _renumbered(self, value: Value, new: dict[int, int], inputs: list[int]) -> Value:
        params = (inputs.index(value.params[0]),) if value.op == "load" else value.params
        return Value(value.op, tuple(new[a] for a in value.args), params)

    def number(self, size: Size) -> int | str:
        """A size as a spec writes it: a number, or the name of an argument."""
        if isinstance(size, int):
            return size
        for n, known in enumerate(self.sizes):
            if str(known) == str(size):
                return f"n{n}"
        self.sizes.append(size)
        return f"n{len(self.sizes) - 1}"

    # ---- values -------------------------------------------------------------------------------------------------

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """A value computed from others."""
        if name in fusible.LOGIC and not all(a in self._bools for a in args):
            raise RefusedError("a bitwise operation on numbers")
        if name not in fusible.LOGIC and name != "float":
            args = tuple(self._as_float(a) if n or name != "where" else a for n, a in enumerate(args))
        one = self.constant(1.0) if name == "div" else None
        if (
            one is not None
            and args[0] != one
            and (inverse := self._known.get(Value("div", (one, args[1])))) is not None
        ):
            name, args = "mul", (args[0], inverse)  # one division for all by the same
        i = self._add(Value(name, args, params))
        if name in fusible.LOGIC or name in ("lt", "le", "gt", "ge", "eq", "ne"):
            self._bools.add(i)
        return i

    def constant(self, x: Any) -> int:
        """A number."""
        return self._add(Value("constant", (), (float(x),)))

    def _as_float(self, i: int) -> int:
        return self._add(Value("float", (i,))) if i in self._bools else i

    def _add(self, item: Value) -> int:
        if item not in self._known:
            self._known[item] = len(self._values)
            self._values.append(item)
        return self._known[item]

    def evaluate(self, node: fx.Node, access: Access) -> int:
        """The value of `node` at the elements that `access` names."""
        key = (node, str(access))
        if key not in self._known:
            self._known[key] = self._evaluate(node, access)
        return self._known[key]

    def _evaluate(self, node: fx.Node, access: Access) -> int:
        if self._depth == DEEPEST or self.is_leaf(node) or not fusible.is_fusible(node):
            return self._load(node, access)
        self._depth += 1
        try:
            i = self._compute(node, access)
        except NoAccessError:
            return self._load(node, access)  # whoever computes it, it is not this region
        finally:
            self._depth -= 1
        self.interior.add(node)
        return i

    def _load(self, node: fx.Node, access: Access) -> int:
        x = value(node)
        if x.dtype not in LOADABLE and x.dim():
            raise RefusedError(f"%{node.name} is {x.dtype}")
        try:
            rows, cols = split(in_memory(access, x.shape, x.stride()), self.cols)
        except NoAccessError as why:
            raise RefusedError(f"%{node.name} cannot be indexed: {why}") from None
        if node not in self.tensors:
            self.tensors.append(node)
        dtype = str(x.dtype).removeprefix("torch.")
        item = Input(self.tensors.index(node), dtype, self._digits(rows), self._digits(cols))
        if item not in self._known:
            self._known[item] = len(self._inputs)
            self._inputs.append(item)
        i = self._add(Value("load", (), (self._known[item],)))
        if x.dtype == torch.bool:
            self._bools.add(i)
        return i

    def _digits(self, digits: Access) -> Digits:
        if all(same(stride, 0) for _, stride in digits):
            return ()
        return tuple((self.number(size), self.number(stride)) for size, stride in digits)

    def _compute(self, node: fx.Node, access: Access) -> int:
        target: Any = node.target
        shape = list(value(node).shape) if isinstance(node.meta["val"], torch.Tensor) else []
        if target in fusible.RESHAPES:
            return self.evaluate(node.args[0], access)  # type: ignore[arg-type]
        if target in fusible.PERMUTES:
            return self.evaluate(node.args[0], permuted(access, shape, _dims(node)))  # type: ignore[arg-type]
        if target is aten.expand.default:
            return self.evaluate(node.args[0], broadcast(access, shape, value(node.args[0]).shape))  # type: ignore[arg-type]
        if fusible.is_moment(node):
            return self._moment(node, access)
        if fusible.is_row_reduction(node):
            return self._row_reduction(node, access)
        if target in ops.CASTS:
            return self._marker(node, access)
        if target in fusible.CONSTANTS:
            i = self.constant(fusible.constant_of(node))
            return self._to_bool(i) if value(node).dtype == torch.bool else i
        if target in fusible.RANDOM:
            return self._random(node, access, shape)
        if target in fusible.CONVERSIONS:
            return self._converted(self._argument(node.args[0], access, shape), value(node).dtype)
        args = [self._argument(a, access, shape) for a in node.args]
        if target is aten.pow.Tensor_Scalar:
            return self._power(args[0], node.args[1])  # type: ignore[arg-type]
        rule = fusible.POINTWISE.get(target)
        if rule is None:
            raise RefusedError(f"no rule for {target}")
        kwargs = {k: a if k == "alpha" else self._argument(a, access, shape) for k, a in node.kwargs.items()}
        if target in fusible.EQUALITIES:
            args = [self._as_stored(i, a) for i, a in zip(args, node.args, strict=True)]
        return self._rounded(rule(self, *args, **kwargs), value(node).dtype)

    def _argument(self, arg: Any, access: Access, shape: list[Size]) -> Any:
        if isinstance(arg, fx.Node):
            return self.evaluate(arg, broadcast(access, shape, list(value(arg).shape)))
        return None if arg is None else self.constant(arg)

    def _converted(self, i: int, dtype: torch.dtype) -> int:
        if dtype == torch.bool:
            return i if i in self._bools else self._to_bool(i)
        return self._rounded(self._as_float(i), dtype)

    def _rounded(self, i: int, dtype: torch.dtype) -> int:
        """Values stay FP32 until they are stored. But what is too large for FP16 becomes inf, which a loss scaler must
        see."""
        return self.op("round", i, params=("float16",)) if dtype == torch.float16 else i

    def _as_stored(self, i: int, arg: Any) -> int:
        """Value `i` of node `arg` with the bits it has in memory: the maximum of a row equals one of its elements, even
        where one of the two was loaded and the other computed again."""
        narrow = isinstance(arg, fx.Node) and value(arg).dtype == torch.bfloat16 and self._values[i].op != "load"
        return self.op("round", i, params=("bfloat16",)) if narrow else i

    def _to_bool(self, i: int) -> int:
        return self.op("ne", i, self.constant(0.0))

    def _power(self, x: int, exponent: float) -> int:
        square = self.op("mul", x, x) if exponent in (2, 3, 4) else x
        if exponent == 3:
            return self.op("mul", square, x)
        if exponent == 4:
            return self.op("mul", square, square)
        name = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
        return self.op(name, x) if name else square

    def _random(self, node: fx.Node, access: Access, shape: list[Size]) -> int:
        seed = self._load(node.args[1], ())  # type: ignore[arg-type]
        rows, cols = split(access, self.cols)
        offset = node.kwargs.get("offset", 0)
        if offset:
            raise RefusedError("random numbers with an offset")
        return self._add(Value("random", (seed,), (self._digits(rows), self._digits(cols))))

    # ---- reductions ---------------------------------------------------------------------------------------------

    def _of_each_row(self, node: fx.Node, access: Access) -> int:
        """The source of a reduction over rows of this iteration space."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        n = len(fusible.reduced_dims(node))
        length: Size = 1
        for size in value(source).shape[-n:]:
            length = length * size
        if not (equal(access, self.each_row) and same(length, self.cols)):
            raise NoAccessError(f"%{node.name} reduces other rows")
        return self.evaluate(source, self.everything)

    def _row_reduction(self, node: fx.Node, access: Access) -> int:
        source = self._of_each_row(node, access)
        name = fusible.REDUCTIONS[node.target]  # type: ignore[index]
        if name == "row_mean":
            return self._rounded(self._mean(source), value(node).dtype)
        return self._rounded(self.op(name, source), value(node).dtype)

    def _mean(self, source: int) -> int:
        return self.op("div", self.op("row_sum", source), self.constant(self.cols))

    def _moment(self, node: fx.Node, access: Access) -> int:
        moments: fx.Node = node.args[0]  # type: ignore[assignment]
        source = self._of_each_row(moments, access)
        self.interior.add(moments)
        mean = self._mean(source)
        if node.args[1] == 1:
            return mean
        correction = moments.kwargs.get("correction", 1)
        centred = self.op("sub", source, mean)
        squares = self.op("row_sum", self.op("mul", centred, centred))
        return self.op("div", squares, self.constant(max(0, self.cols - (1 if correction is None else correction))))  # type: ignore[operator]

    # ---- markers ------------------------------------------------------------------------------------------------

    def _marker(self, node: fx.Node, access: Access) -> int:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if node.target is ops.scale:
            _, fmt, *power = node.args
            name = "scale_power_of_two" if power and power[0] else "scale"
            return self.op(name, self.evaluate(source, access), params=(fmt,))
        if node.target is ops.amax:
            return self._amax(node, access)
        if node.target is ops.dequantize:
            _, scale, granularity, dtype = node.args
            layout = CastLayout(parse_granularity(granularity))  # type: ignore[arg-type]
            data = self.evaluate(source, access)
            where = layout.scale_access(access, list(value(source).shape))
            return self._rounded(self.op("mul", data, self.evaluate(scale, where)), dtype)  # type: ignore[arg-type]
        raise NoAccessError("quantized data is read from memory")

    def _amax(self, node: fx.Node, access: Access) -> int:
        layout = CastLayout.of(node)
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if not equal(access, self.stat_access(source, layout)):
            raise NoAccessError(f"%{node.name} belongs to other groups")
        x = self.evaluate(source, self.everything)
        kind, size = layout.granularity.kind, layout.granularity.size
        if kind == "row" and not layout.transpose:
            return self.op("row_amax", x)
        if kind == "group":
            return self.op("col_group_amax" if layout.transpose else "group_amax", x, params=(size,))
        if kind == "block":
            return self.op("block_amax", x, params=(size,))
        raise NoAccessError("its amax is known only when all rows have been read")

    def stat_access(self, source: fx.Node, layout: CastLayout) -> Access:
        """The access to a scale of `source`, where this iteration space runs over `source` element by element."""
        shape = list(value(source).shape)
        if not same(fusible.elements(source), self.rows * self.cols) or not same(shape[-1], self.cols):
            raise NoAccessError(f"%{source.name} is not what this region runs over")
        if not layout.transpose:
            return layout.scale_access(self.everything, shape)
        if len(shape) != 2:
            raise NoAccessError("a batch is transposed matrix by matrix")
        across = ((shape[0], 1), (shape[1], shape[0]))
        return layout.scale_access(across, [shape[1], shape[0]])


def _dims(node: fx.Node) -> list[int]:
    n = value(node).dim()
    if node.target is aten.permute.default:
        return [d % n for d in node.args[1]]  # type: ignore[union-attr]
    dims = list(range(n))
    a, b = (0, 1) if node.target is aten.t.default else node.args[1:3]
    if n >= 2:
        dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return dims
