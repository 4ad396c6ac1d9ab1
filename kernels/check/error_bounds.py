"""Bounds of how far the values of a generated kernel may lie from the reference's: an absolute one for each element.

    bound of op(a, b)  =  what the bounds of a and b can do to the result  +  the rounding of op itself

Most operations are rounded alike by both, so that most bounds are 0 and the kernel must agree bit for bit. A bound
begins where it may not: at a transcendental function, at a sum (in another order), and on a GPU at a product that is
added to something (contracted to one fused multiply-add, the product is not rounded). It then grows as mathematics has
it: along the derivative of a function, and through a cancellation unchanged while the result shrinks.

A bool has the bound 1 where it may be either. A bound is inf where nothing can be said, as beyond a division by
something that may be 0. Bounds are FP64, so their own rounding does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp8compile.kernels.codegen.schedule.tiling import Tiling
from fp8compile.kernels.codegen.spec.operation import Operation, Spread
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.region import PARTIALS, Value
from fp8compile.kernels.reference.region_reference import Evaluation

U = 2.0**-24  # half a unit in the last place of FP32, relative
LARGEST = torch.finfo(torch.float32).max
FLUSHED = 2.0**-126  # approximate functions may turn what is subnormal into 0
LEAST_DEPTH = 64  # see `_depth`
SIGN = 1e-300  # the bound of a product with 0 or a quotient by inf: no more than the sign of a zero
TOO_LARGE = 2.0**126  # a GPU's approximate division by more is 0 (PTX, div.full.f32)
SLACK = 1.01  # for the rounding of x ± bound itself


class Bounds(Evaluation):
    """`self[i]`: the bound of value i of `values`, in its shape. Values in `given` are taken as they are: bound 0."""

    def __init__(self, values: Evaluation, tiling: Tiling, given: Mapping[int, Tensor], on_gpu: bool):
        zeros = {i: torch.zeros_like(x, dtype=torch.float64) for i, x in given.items()}
        super().__init__(values.part, values.inputs, values.sizes, zeros)
        self.values, self.tiling, self.on_gpu = values, tiling, on_gpu

    def _compute(self, i: int, value: Value) -> Tensor:
        if not value.args or value.op == "random":
            return torch.zeros_like(self.values[i], dtype=torch.float64)
        reduces = value.op.startswith("row_") or value.op in PARTIALS or value.op.endswith("amax")
        bound = self._reduced(i, value) if reduces else self._elementwise(i, value)
        return bound.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def quotient(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (x / scale, its bound) of value i, a quantization."""
        extent = self.part.extents[i]
        x, scale = (self.values.spread(a, extent).double() for a in self.part.values[i].args)
        return (x.float() / scale.float()).double(), self[i]

    # ---- element by element -------------------------------------------------------------------------------------

    def _elementwise(self, i: int, value: Value) -> Tensor:
        extent, operation = self.part.extents[i], OPERATIONS[value.op]
        args = [self.values.spread(a, extent) for a in value.args]
        bounds = [self.spread(a, extent) + self._unrounded(a, value, extent) for a in value.args]
        if self.on_gpu and operation.spread is not Spread.CHOICE:  # what is subnormal may count as 0
            bounds = [
                b + torch.where(x.abs() < FLUSHED, x.abs().double(), 0.0) for b, x in zip(bounds, args, strict=True)
            ]
        out = self.values[i].double() if value.op != "quantize" else (args[0] / args[1]).double()
        passed = _passed_on(operation, value, args, bounds, out)
        if operation.gives_bool or operation.spread is Spread.CHOICE:
            return passed
        inexact = torch.stack(torch.broadcast_tensors(*bounds)).amax(0) > 0
        own = self._own(operation, args[0].double(), out)
        if operation.nearest:
            own = torch.where(inexact, 2 * U * out.abs(), 0.0)
        passed = torch.where(inexact, passed.clamp_min(SIGN), passed)
        if value.op == "div" and self.on_gpu:
            passed = torch.where(args[1].abs() > TOO_LARGE, torch.inf, passed)
        return passed + torch.where(out.isfinite(), own, 0.0)

    def _unrounded(self, i: int, user: Value, extent: tuple[int, int]) -> Tensor | float:
        """Return how far value i, which `user` reads, may be off as it is not rounded.

        On a GPU a product that is added may stay unrounded (so may its absolute value: |x·x| is x·x). With a power of
        two that it is multiplied by it is one instruction (FMUL.D2 halves), and overflows no sooner.
        """
        if not self.on_gpu or user.op not in ("add", "sub", "mul"):
            return 0.0
        while self.part.values[i].op in ("neg", "abs", "float"):
            i = self.part.values[i].args[0]
        if self.part.values[i].op != "mul":
            return 0.0
        product = self.values.spread(i, extent).double().abs()
        if user.op == "mul":
            scaled = any(self._is_power_of_two(a) for a in user.args)
            return torch.where(product.isinf(), torch.inf, 0.0) if scaled else 0.0
        return product * U  # a product that overflows may not, contracted: then anything can come

    def _is_power_of_two(self, i: int) -> bool:
        value = self.part.values[i]
        return value.op == "constant" and abs(math.frexp(value.params[0])[0]) == 0.5

    def _own(self, operation: Operation, x: Tensor, out: Tensor) -> Tensor:
        """Return how far `out`, the result for `x`, may be off where arguments are exact."""
        interpreted = None if self.on_gpu else operation.interpreted_rounding
        rounding = interpreted or operation.rounding
        if rounding is None:
            return torch.zeros_like(out)
        grows = 2 * x.abs() if rounding.grows else 0.0
        return (rounding.relative + grows) * U * out.abs() + rounding.absolute * U + FLUSHED

    # ---- reductions ---------------------------------------------------------------------------------------------

    def _reduced(self, i: int, value: Value) -> Tensor:
        """Return the bound of a reduction: a maximum moves no further than its arguments; a sum adds, and rounds."""
        self[value.args[0]]
        if not value.op.endswith("sum"):
            return self._reduce(replace(value, op="row_max") if value.op == "row_min" else value)
        passed = self._reduce(value)
        x = self.values[value.args[0]].double().abs()
        rounding = 2 * self._depth(value.op) * U * self._total(i, x)
        # in another order, or with a product that is not rounded by itself, a sum may overflow or may not
        is_product = self.part.values[value.args[0]].op == "mul"
        finite = x.nan_to_num(nan=0.0, posinf=LARGEST if is_product else 0.0)
        passed = torch.where(self._total(i, finite) > LARGEST / 2, torch.inf, passed)
        return passed + torch.where(self.values[i].isfinite(), rounding, 0.0)

    def _total(self, i: int, x: Tensor) -> Tensor:
        """Return the sum `i` with `x` as what it adds up."""
        return Evaluation(self.part, self.inputs, self.sizes, {self.part.values[i].args[0]: x})[i]

    def _depth(self, op: str) -> int:
        """Return how many roundings a summand goes through.

        Not the number of summands: both sides add up many partial sums and then those (torch in 4 levels of at most 16,
        or thread by thread; a kernel the tile's elements of a thread, then between threads). For a column sum, add the
        tiles that a program walks over.
        """
        if op == "row_sum":
            return LEAST_DEPTH
        return LEAST_DEPTH + -(-self.rows // (self.tiling.block_rows * self.tiling.row_programs))


def _passed_on(
    operation: Operation, value: Value, args: Sequence[Tensor], bounds: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Return what the bounds of the arguments can do to the result."""
    match operation.spread:
        case Spread.COMPARISON:
            (a, b), bound = args, bounds[0] + bounds[1]
            either = (bound > 0) & (((a.double() - b.double()).abs() <= bound) | bound.isinf())
            return either.double()
        case Spread.CHOICE:
            _, a, b = (x.double() for x in args)
            chosen = torch.where(args[0], bounds[1], bounds[2])
            either = torch.maximum(bounds[1], bounds[2]) + (a - b).abs().nan_to_num(nan=torch.inf)
            return torch.where(bounds[0] > 0, either, chosen)
        case Spread.MONOTONE | Spread.MONOTONE_BUT_AT_0:
            return _shifted(operation, value, args[0].double(), bounds[0])
        case Spread.SCALE:
            return _shifted(operation, value, args[0].float(), bounds[0])
        case Spread.PERIODIC:
            return torch.where(bounds[0].isinf(), torch.inf, bounds[0].clamp_max(2.0))
        case Spread.SUM:
            return bounds[0] + bounds[1]
        case Spread.PRODUCT:
            a, b = (x.double() for x in args)
            return _times(a, bounds[1]) + _times(b, bounds[0]) + bounds[0] * bounds[1]
        case Spread.QUOTIENT:
            room = args[1].double().abs() - bounds[1]
            return torch.where(room > 0, (bounds[0] + _times(out, bounds[1])) / room, _unless_exact(bounds))
        case Spread.LARGEST:
            return torch.stack(torch.broadcast_tensors(*bounds)).amax(0)


def _unless_exact(bounds: Sequence[Tensor]) -> Tensor:
    return torch.where((bounds[0] == 0) & (bounds[1] == 0), 0.0, torch.inf)


def _times(x: Tensor, bound: Tensor) -> Tensor:
    return torch.where(bound == 0, 0.0, x.abs() * bound)


def _shifted(operation: Operation, value: Value, x: Tensor, bound: Tensor) -> Tensor:
    """Return how far a monotone function moves if its argument does."""
    is_scale = operation.spread is Spread.SCALE
    here = operation.torch(x, *value.params).double()
    moved = torch.zeros_like(bound)
    for sign in (-1, 1):
        at = (x.double() + sign * SLACK * bound).to(x.dtype)
        there = operation.torch(at.clamp_min(0) if is_scale else at, *value.params).double()
        moved = torch.maximum(moved, (there - here).abs().nan_to_num(nan=torch.inf))
    if is_scale:  # of an amax that may be 0 the scale may be 1, or anything down to the least
        moved = torch.where(x.abs() <= bound, here.clamp_min(1.0), moved)
    if operation.spread is Spread.MONOTONE_BUT_AT_0:
        moved = torch.where(x.abs() <= bound, torch.inf, moved)
    return torch.where(bound == 0, 0.0, moved)
