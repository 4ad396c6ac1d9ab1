"""From nodes of a graph to the spec of a part: the expression graph over rows × cols that computes them.

A `Builder` is asked for nodes ("sinks") that the region shall compute, walks up from them as far as the operators are
fusible, and stops at leaves: what lies in memory already. The same node under two accesses is two values; under one it
is one value, however often it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES, parse_granularity
from fp8compile.kernels.codegen.spec.region import Buffer, Digits, Input, Part, Store, Value
from fp8compile.passes.core import fusible
from fp8compile.passes.core.aten_views import Permutation
from fp8compile.passes.core.compilation import AS_STORED, aten, value
from fp8compile.passes.core.iteration import (
    Access,
    NoAccessError,
    Size,
    broadcast,
    equal,
    in_memory,
    of_rows,
    permuted,
    same,
    split,
    whole,
)  # fmt: skip
from fp8compile.passes.core.marker_views import Dequantize, Scale
from fp8compile.passes.core.node_views import Getitem, argument, call_of, first_input, node_argument
from fp8compile.passes.regions.cast_layout import CastLayout
from fp8compile.passes.regions.part_values import RefusedError, Values

LOADABLE = {*fusible.FLOATS, torch.bool, *FP8_DTYPES}
DEEPEST = 100  # operators one after another that a region computes: each is a few calls of Python deep


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
    interior: set[fx.Node] = field(default_factory=set)
    sinks: list[Sink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = Values(self.rows, self.cols)
        self._known: dict[tuple[fx.Node, str], int] = {}
        self._depth = 0
        self.everything = whole(self.rows, self.cols)
        self.each_row = of_rows(self.rows, self.cols)

    def part(self) -> tuple[Part, list[fx.Node]]:
        """Return the spec of all that the sinks need, and the tensors that it reads, in the order of its arguments."""
        part, tensors = self.values.part([s.store for s in self.sinks])
        return part, [self.tensors[t] for t in tensors]

    def evaluate(self, node: fx.Node, access: Access) -> int:
        """Return the value of `node` at the elements that `access` names."""
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
        return self.values.load(Input(self.tensors.index(node), dtype, self._digits(rows), self._digits(cols)))

    def _digits(self, digits: Access) -> Digits:
        if all(same(stride, 0) for _, stride in digits):
            return ()
        return tuple((self.values.number(size), self.values.number(stride)) for size, stride in digits)

    def _compute(self, node: fx.Node, access: Access) -> int:
        target: Any = node.target
        shape = list(value(node).shape) if isinstance(node.meta["val"], torch.Tensor) else []
        if target in fusible.RESHAPES:
            return self.evaluate(first_input(node), access)
        if view := Permutation.of(node):
            return self.evaluate(view.x, permuted(access, shape, view.dims))
        if target is aten.expand.default:
            source = first_input(node)
            return self.evaluate(source, broadcast(access, shape, value(source).shape))
        if fusible.is_moment(node):
            return self._moment(node, access)
        if fusible.is_row_reduction(node):
            return self._row_reduction(node, access)
        if target in ops.CASTS:
            return self._marker(node, access)
        if target in fusible.CONSTANTS:
            i = self.values.constant(fusible.constant_of(node))
            return self.values.to_bool(i) if value(node).dtype == torch.bool else i
        if target in fusible.RANDOM:
            return self._random(node, access, shape)
        if target in fusible.CONVERSIONS:
            return self.values.converted(self._argument(first_input(node), access, shape), value(node).dtype)
        args = [self._argument(a, access, shape) for a in node.args]
        if target is aten.pow.Tensor_Scalar:
            return self.values.power(args[0], argument(node, "exponent"))
        rule = fusible.POINTWISE.get(target)
        if rule is None:
            raise RefusedError(f"no rule for {target}")
        kwargs = {k: a if k == "alpha" else self._argument(a, access, shape) for k, a in node.kwargs.items()}
        if target in fusible.EQUALITIES:
            args = [self._as_stored(i, a) for i, a in zip(args, node.args, strict=True)]
        # A mask times a mask, or one chosen by another, is a mask: rules compute in numbers
        return self.values.converted(rule(self.values, *args, **kwargs), value(node).dtype)

    def _argument(self, arg: Any, access: Access, shape: list[Size]) -> Any:
        if isinstance(arg, fx.Node):
            return self.evaluate(arg, broadcast(access, shape, list(value(arg).shape)))
        return None if arg is None else self.values.constant(arg)

    def _as_stored(self, i: int, arg: Any) -> int:
        """Return value `i` of node `arg` with the bits it has in memory: the maximum of a row equals one of its
        elements, even where one of the two was loaded and the other computed again."""
        narrow = isinstance(arg, fx.Node) and value(arg).dtype == torch.bfloat16 and self.values.items[i].op != "load"
        return self.values.op("round", i, params=("bfloat16",)) if narrow else i

    def _random(self, node: fx.Node, access: Access, shape: list[Size]) -> int:
        seed = self._load(node_argument(node, "seed"), ())
        rows, cols = split(access, self.cols)
        offset = node.kwargs.get("offset", 0)
        if offset:
            raise RefusedError("random numbers with an offset")
        return self.values.add(Value("random", (seed,), (self._digits(rows), self._digits(cols))))

    # ---- reductions ---------------------------------------------------------------------------------------------

    def _of_each_row(self, node: fx.Node, access: Access) -> int:
        """Return the source of a reduction over rows of this iteration space."""
        source = first_input(node)
        n = len(fusible.reduced_dims(node))
        length: Size = 1
        for size in value(source).shape[-n:]:
            length = length * size
        if not (equal(access, self.each_row) and same(length, self.cols)):
            raise NoAccessError(f"%{node.name} reduces other rows")
        return self.evaluate(source, self.everything)

    def _row_reduction(self, node: fx.Node, access: Access) -> int:
        source = self._of_each_row(node, access)
        name = fusible.REDUCTIONS[call_of(node)]
        if name == "row_mean":
            return self.values.rounded(self.values.row_mean(source), value(node).dtype)
        return self.values.rounded(self.values.op(name, source), value(node).dtype)

    def _moment(self, node: fx.Node, access: Access) -> int:
        item = Getitem(node)
        moments = item.source
        source = self._of_each_row(moments, access)
        self.interior.add(moments)
        mean = self.values.row_mean(source)
        if item.index == 1:
            return mean
        correction: Any = moments.kwargs.get("correction", 1)
        degrees = max(0, self.cols - (1 if correction is None else correction))
        centred = self.values.op("sub", source, mean)
        squares = self.values.op("row_sum", self.values.op("mul", centred, centred))
        return self.values.op("div", squares, self.values.constant(degrees))

    # ---- markers ------------------------------------------------------------------------------------------------

    def _marker(self, node: fx.Node, access: Access) -> int:
        if (scale := Scale.of(node)) and not scale.is_delayed:
            name = "scale_power_of_two" if scale.power_of_two else "scale"
            return self.values.op(name, self.evaluate(scale.amax, access), params=(scale.format,))
        if node.target is ops.amax:
            return self._amax(node, access)
        if restored := Dequantize.of(node):
            layout = CastLayout(parse_granularity(restored.granularity))
            data = self.evaluate(restored.data, access)
            where = layout.scale_access(access, list(value(restored.data).shape))
            product = self.values.op("mul", data, self.evaluate(restored.scale, where))
            return self.values.rounded(product, restored.dtype)
        raise NoAccessError("quantized data is read from memory")

    def cast_source(self, node: fx.Node) -> int:
        """Return what an amax or a quantize reads, element by element."""
        source = first_input(node)
        i = self.evaluate(source, self.everything)
        return self._as_stored(i, source) if AS_STORED in node.meta else i

    def _amax(self, node: fx.Node, access: Access) -> int:
        layout = CastLayout.of(node)
        source = first_input(node)
        if not equal(access, self.stat_access(source, layout)):
            raise NoAccessError(f"%{node.name} belongs to other groups")
        x = self.cast_source(node)
        kind, size = layout.granularity.kind, layout.granularity.size
        if kind == "row" and not layout.transpose:
            return self.values.op("row_amax", x)
        if kind == "group":
            return self.values.op("col_group_amax" if layout.transpose else "group_amax", x, params=(size,))
        if kind == "block":
            return self.values.op("block_amax", x, params=(size,))
        raise NoAccessError("its amax is known only when all rows have been read")

    def stat_access(self, source: fx.Node, layout: CastLayout) -> Access:
        """Return the access to a scale of `source`, where this iteration space runs over `source` element by
        element."""
        shape = list(value(source).shape)
        if not same(fusible.elements(source), self.rows * self.cols) or not same(shape[-1], self.cols):
            raise NoAccessError(f"%{source.name} is not what this region runs over")
        if not layout.transpose:
            return layout.scale_access(self.everything, shape)
        if len(shape) != 2:
            raise NoAccessError("a batch is transposed matrix by matrix")
        across = ((shape[0], 1), (shape[1], shape[0]))
        return layout.scale_access(across, [shape[1], shape[0]])
