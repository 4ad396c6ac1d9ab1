"""The operators that regions understand: for each of a decomposed graph, how its value is written in a spec.

Operators that are one operation of generated kernels are named in that operation's row (`OPERATIONS`); those that are
several have a rule here; so do reductions. An operator without either is a border of regions, and Inductor's. Adding
one is adding its name to a row, a row to `kernels/codegen/spec/operations.py`, or a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx
from torch._inductor import inductor_prims  # Inductor's random operators: a dropout is one of them by now

from fp8compile import ops
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.region import BAND
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import STANDS_ALONE, aten, is_tensor, value
from fp8compile.passes.core.iteration import product, same
from fp8compile.passes.core.marker_views import Amax
from fp8compile.passes.core.node_views import Getitem, argument, first_input

prims = torch.ops.prims
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Views that keep the order of elements.
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.clone.default,
}  # fmt: skip
PERMUTES = {aten.permute.default, aten.t.default, aten.transpose.int}
REORDERED = RESHAPES | PERMUTES
LAYOUTS = REORDERED | {aten.expand.default}


class Writer(Protocol):
    """The object with which rules write values."""

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        """Return the number of a value computed from others."""
        ...

    def constant(self, x: Any) -> int:
        """Return the number of a constant."""
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
    """Return 1 / (1 + exp(-x)), in the pieces that x · sigmoid(x) has in other decompositions."""
    return w.op("div", w.constant(1.0), w.op("add", w.op("exp", w.op("neg", x)), w.constant(1.0)))


def _isnan(w: Writer, x: int) -> int:
    return w.op("ne", x, x)


def _overload(name: str) -> Any:
    """Return the overload of an ATen operator: "add.Tensor"."""
    operator_name, overload = name.split(".")
    return getattr(getattr(aten, operator_name), overload)


def overloads_of(name: str) -> set[Any]:
    """Return the ATen overloads that are operation `name` of `kernels/codegen/spec/operations.py`."""
    row = OPERATIONS[name]
    return {_overload(overload) for overload in (*row.aten, *row.aten_of_bools)}


POINTWISE: dict[Any, Rule] = {overload: _plain(op) for op in OPERATIONS for overload in overloads_of(op)} | {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: lambda w, a, b, alpha=1: _sub(w, b, a, alpha),
    aten.clamp.default: lambda w, x, low=None, high=None: _clamp(w, x, low, high),
    aten.relu.default: _relu,
    aten.square.default: _square,
    aten.sigmoid.default: _sigmoid,
    aten.isnan.default: _isnan,
}
EQUALITIES = overloads_of("eq") | overloads_of("ne")
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


def is_zero(node: Any) -> bool:
    """Return True if `node` is a constant full of zeros."""
    return isinstance(node, fx.Node) and node.target in CONSTANTS and bool(fill_of(node) == 0)


def reduced_dims(node: fx.Node) -> list[int]:
    """Return the dimensions of its source that a reduction removes, in order."""
    n = value(first_input(node)).dim()
    return sorted(d % n for d in argument(node, "dim") or range(n))


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


def laid_out(node: fx.Node) -> fx.Node:
    """Return the tensor of which `node` is a view, or a copy that is laid out in another way."""
    while node.target in REORDERED:
        node = first_input(node)
    return node


def made_at(node: fx.Node) -> fx.Node:
    """Return the node that computed the values of `node`, which may be a view, a copy or a conversion of it."""
    while (node := laid_out(node)).target in CONVERSIONS:
        node = first_input(node)
    return node


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
    image or sequence that is scaled and shifted by values of its own."""
    return math.prod(value(first_input(node)).shape[: reduced_dims(node)[0]])


def is_global_amax(node: fx.Node) -> bool:
    """Return True if `node` is an amax of all rows: of a tensor, or of a transposed tensor's rows."""
    amax = Amax.of(node)
    return amax is not None and (amax.granularity == "tensor" or (amax.granularity == "row" and amax.transpose))


def is_fusible(node: fx.Node) -> bool:
    """Return True if a region can compute `node`."""
    if node.op != "call_function":
        return False
    if node.target in ops.CASTS:
        return True
    if node.target in LAYOUTS:
        return STANDS_ALONE not in node.meta and is_tensor(node) and value(node).dtype in HELD
    if is_moment(node):
        return is_row_reduction(first_input(node))
    return is_pointwise(node) or is_row_reduction(node) or is_col_sum(node)


def is_moment(node: fx.Node) -> bool:
    """Return True if `node` takes the variance or the mean out of a var_mean."""
    getitem = Getitem.of(node)
    return getitem is not None and getitem.source.target in MOMENTS


def is_opaque(node: fx.Node) -> bool:
    """Return True if a library's kernel computes `node`: nothing that reads it can be done as it is written."""
    if node.op != "call_function":
        return True
    getitem = Getitem.of(node)
    if getitem:
        return is_opaque(getitem.source)
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
