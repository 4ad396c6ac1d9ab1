"""What a region understands: for each operator of a decomposed graph, how its value is written in a spec.

Pointwise operators are rows of a table; so are reductions. An operator without a row is a border of regions, and
Inductor's. Adding one is adding a row (and an expression in `kernels/codegen/expressions.py` if it is new there).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx
from torch._inductor import inductor_prims  # Inductor's random operators: a dropout is one of them by now

from fp8compile import ops
from fp8compile.kernels.codegen.spec import BAND
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import STANDS_ALONE, aten, is_tensor, value
from fp8compile.passes.core.iteration import product, same
from fp8compile.passes.core.node_views import Amax, Getitem, argument, first_input

prims = torch.ops.prims
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Views that keep the order of elements.
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.clone.default,
}  # fmt: skip
PERMUTES = {aten.permute.default, aten.t.default, aten.transpose.int}
LAYOUTS = RESHAPES | PERMUTES | {aten.expand.default}


class Writer(Protocol):
    """What the rows of the table write with."""

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """Write a value computed from others, and return its number."""
        ...

    def constant(self, x: Any) -> int:
        """Write a number, and return the number of that value."""
        ...


Rule = Callable[..., int]  # (writer, *arguments of the operator): tensors come as value numbers, numbers as constants


def _plain(name: str) -> Rule:
    return lambda w, *args, **_: w.op(name, *args)


def _add(w: Writer, a: int, b: int, alpha: float = 1) -> int:
    return w.op("add", a, b if alpha == 1 else w.op("mul", b, w.constant(alpha)))


def _sub(w: Writer, a: int, b: int, alpha: float = 1) -> int:
    return w.op("sub", a, b if alpha == 1 else w.op("mul", b, w.constant(alpha)))


def _clamp(w: Writer, x: int, low: int | None = None, high: int | None = None) -> int:
    x = x if low is None else w.op("maximum", x, low)
    return x if high is None else w.op("minimum", x, high)


def _square(w: Writer, x: int) -> int:
    return w.op("mul", x, x)


def _relu(w: Writer, x: int) -> int:
    return w.op("maximum", x, w.constant(0.0))


def _sigmoid(w: Writer, x: int) -> int:
    """Return 1 / (1 + exp(-x)), in pieces that x · sigmoid(x) as other decompositions write it has in common with
    it."""
    return w.op("div", w.constant(1.0), w.op("add", w.op("exp", w.op("neg", x)), w.constant(1.0)))


def _isnan(w: Writer, x: int) -> int:
    return w.op("ne", x, x)


POINTWISE: dict[Any, Rule] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: lambda w, a, b, alpha=1: _sub(w, b, a, alpha),
    aten.mul.Tensor: _plain("mul"),
    aten.mul.Scalar: _plain("mul"),
    aten.div.Tensor: _plain("div"),
    aten.div.Scalar: _plain("div"),
    aten.neg.default: _plain("neg"),
    aten.abs.default: _plain("abs"),
    aten.maximum.default: _plain("maximum"),
    aten.minimum.default: _plain("minimum"),
    aten.clamp_min.default: _plain("maximum"),
    aten.clamp_min.Tensor: _plain("maximum"),
    aten.clamp_max.default: _plain("minimum"),
    aten.clamp_max.Tensor: _plain("minimum"),
    aten.clamp.default: lambda w, x, low=None, high=None: _clamp(w, x, low, high),
    aten.relu.default: _relu,
    aten.square.default: _square,
    aten.exp.default: _plain("exp"),
    aten.exp2.default: _plain("exp2"),
    aten.expm1.default: _plain("expm1"),
    aten.log.default: _plain("log"),
    aten.log2.default: _plain("log2"),
    aten.log1p.default: _plain("log1p"),
    aten.sin.default: _plain("sin"),
    aten.cos.default: _plain("cos"),
    aten.tanh.default: _plain("tanh"),
    aten.erf.default: _plain("erf"),
    aten.sigmoid.default: _sigmoid,
    aten.sqrt.default: _plain("sqrt"),
    aten.rsqrt.default: _plain("rsqrt"),
    aten.reciprocal.default: _plain("reciprocal"),
    aten.floor.default: _plain("floor"),
    aten.ceil.default: _plain("ceil"),
    aten.lt.Tensor: _plain("lt"), aten.lt.Scalar: _plain("lt"),
    aten.le.Tensor: _plain("le"), aten.le.Scalar: _plain("le"),
    aten.gt.Tensor: _plain("gt"), aten.gt.Scalar: _plain("gt"),
    aten.ge.Tensor: _plain("ge"), aten.ge.Scalar: _plain("ge"),
    aten.eq.Tensor: _plain("eq"), aten.eq.Scalar: _plain("eq"),
    aten.ne.Tensor: _plain("ne"), aten.ne.Scalar: _plain("ne"),
    aten.isnan.default: _isnan,
    aten.logical_and.default: _plain("and"), aten.bitwise_and.Tensor: _plain("and"),
    aten.logical_or.default: _plain("or"), aten.bitwise_or.Tensor: _plain("or"),
    aten.logical_xor.default: _plain("xor"), aten.bitwise_xor.Tensor: _plain("xor"),
    aten.logical_not.default: _plain("not"), aten.bitwise_not.default: _plain("not"),
    aten.where.self: _plain("where"),
}  # fmt: skip
EQUALITIES = {aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar}
LOGIC = {"and", "or", "xor", "not"}  # bitwise operators, which mean this for bools only
CONVERSIONS = {prims.convert_element_type.default, aten._to_copy.default}
POWERS = {2, 3, 4, 0.5, -0.5, -1, 1}
CONSTANTS = {aten.full.default, aten.scalar_tensor.default, aten.full_like.default}
RANDOM = {torch.ops.prims.inductor_random.default}
REDUCTIONS = {
    aten.sum.dim_IntList: "row_sum", aten.mean.dim: "row_mean", aten.amax.default: "row_max",
    aten.amin.default: "row_min",
}  # fmt: skip
MOMENTS = {aten.var_mean.correction}
ELEMENTWISE = {*POINTWISE, *CONVERSIONS, *CONSTANTS, *RANDOM, aten.pow.Tensor_Scalar}
HELD = (*FLOATS, torch.bool)  # dtypes of values that a region computes with
assert inductor_prims.random is torch.ops.prims.inductor_random.default


def is_pointwise(node: fx.Node) -> bool:
    """Return True if `node` is computed element by element from values that a region can hold."""
    if node.op != "call_function" or node.target not in ELEMENTWISE or not is_tensor(node):
        return False
    out = value(node)
    if out.dtype not in HELD:
        return False
    if any(is_tensor(i) and value(i).device != out.device for i in node.all_input_nodes):
        return False  # a number on a CPU
    if node.target in CONVERSIONS:
        return _holds(first_input(node))
    if node.target in CONSTANTS:
        return isinstance(fill_of(node), (int, float, bool))
    if node.target in RANDOM:
        return argument(node, "mode") == "rand"
    if node.target is aten.pow.Tensor_Scalar:
        return argument(node, "exponent") in POWERS and _holds(argument(node, "self"))
    if node.target in POINTWISE:
        return all(_holds(a) for a in (*node.args, *node.kwargs.values()))
    return False


def _holds(arg: Any) -> bool:
    """Return True if an argument is a number, or a tensor of a type that a region computes with."""
    if isinstance(arg, fx.Node):
        return is_tensor(arg) and value(arg).dtype in HELD
    return arg is None or isinstance(arg, (int, float, bool))


def fill_of(node: fx.Node) -> Any:
    """Return what a constant tensor is filled with: a number, or a node."""
    return argument(node, "s" if node.target is aten.scalar_tensor.default else "fill_value")


def constant_of(node: fx.Node) -> float | bool:
    """Return the number that a constant tensor is filled with."""
    fill = fill_of(node)
    return bool(fill) if value(node).dtype == torch.bool else float(fill)


def reduced_dims(node: fx.Node) -> list[int]:
    """Return the dimensions of its source that a reduction removes, in order."""
    source, dims = value(first_input(node)), argument(node, "dim")
    if dims is None or dims == []:
        return list(range(source.dim()))
    return sorted(d % source.dim() for d in dims)


def is_row_reduction(node: fx.Node) -> bool:
    """Return True if `node` reduces the last dimensions of a floating-point tensor."""
    if node.op != "call_function" or (node.target not in REDUCTIONS and node.target not in MOMENTS):
        return False
    source = first_input(node)
    if not (is_tensor(source) and value(source).dtype in FLOATS):
        return False
    if is_tensor(node) and value(node).dtype not in FLOATS:
        return False
    dims, n = reduced_dims(node), value(source).dim()
    return 0 < len(dims) < n and dims == list(range(n - len(dims), n))


def is_col_sum(node: fx.Node) -> bool:
    """Return True if `node` sums over all but the last dimension, or over bands of rows (`bands_of`)."""
    if node.op != "call_function" or node.target is not aten.sum.dim_IntList:
        return False
    source = first_input(node)
    if not (is_tensor(source) and value(source).dtype in FLOATS):
        return False
    if value(node).dtype not in FLOATS:
        return False
    dims, n = reduced_dims(node), value(source).dim()
    if not dims or dims != list(range(dims[0], n - 1)):
        return False
    rows = value(source).shape[:-1]
    in_bands = dims[0] > 0 and all(isinstance(size, int) for size in rows)
    return dims[0] == 0 or (in_bands and math.prod(rows[dims[0] :]) % BAND == 0 and math.prod(rows) > 0)


def bands_of(node: fx.Node) -> int:
    """Return into how many bands of rows a column sum divides its source, each summed by itself: 1, or one for each
    image or sequence where what was scaled and shifted by it sums up."""
    shape = value(first_input(node)).shape[: reduced_dims(node)[0]]
    return math.prod(shape)


def is_global_amax(node: fx.Node) -> bool:
    """Return True if `node` is an amax for which all rows must be seen: of a tensor, or of a transposed tensor's
    rows."""
    amax = Amax.of(node)
    return amax is not None and (amax.granularity == "tensor" or (amax.granularity == "row" and amax.transpose))


def is_fusible(node: fx.Node) -> bool:
    """Return True if a region can compute `node`."""
    if node.op != "call_function":
        return False
    if node.target in ops.CASTS:
        return True
    if node.target in LAYOUTS:
        return (
            STANDS_ALONE not in node.meta
            and is_tensor(node)
            and isinstance(node.args[0], fx.Node)
            and value(node).dtype in HELD
        )
    if is_moment(node):
        return is_row_reduction(first_input(node))
    return is_pointwise(node) or is_row_reduction(node) or is_col_sum(node)


def is_moment(node: fx.Node) -> bool:
    """Return True if `node` takes the variance or the mean out of a var_mean."""
    item = Getitem.of(node)
    return item is not None and item.source.target in MOMENTS


def is_opaque(node: fx.Node) -> bool:
    """Return True if a library's kernel computes `node`: nothing that reads it can be done as it is written."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return is_opaque(first_input(node))
    return str(node.target).startswith("fp8.") or is_library_kernel(node)


def is_library_kernel(node: fx.Node) -> bool:
    """Return True if `node` is a matmul, an attention, a convolution, or something that holds a graph of its own."""
    holds_a_graph = isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.op == "call_function" and (holds_a_graph or operators.is_library_kernel(node.target))


def elements(node: fx.Node) -> Any:
    """Return how many elements `node` has."""
    return product(value(node).shape)


def same_elements(a: fx.Node, b: fx.Node) -> bool:
    """Return True if two tensors are known to have equally many elements."""
    return same(elements(a), elements(b))
