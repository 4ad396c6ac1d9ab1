"""The meaning of a region, in plain torch: what a generated kernel must compute, and what a CPU runs.

A value lives in the shape of its extent: [R, C], [R, 1], [1, C], [1, 1], or [R, ceil(C / g)] for groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import FORMATS, ceil_div, round_up
from fp8compile.kernels.codegen.schedule.tiling import Schedule, resolve
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.reductions import REDUCTIONS
from fp8compile.kernels.codegen.spec.region import (
    GROUP_REDUCTIONS,
    NUMBER,
    ROW_REDUCTIONS,
    Digits,
    Input,
    Part,
    Region,
    Store,
    Value,
    join,
    number_of,
)
from fp8compile.kernels.reference.philox import uniform


def run(region: Region, schedule: Schedule, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the buffers of `region`. Of one with a result a program, the first entry holds it, the others are 0.

    What no store writes is NaN (in integers, all bits set): a kernel that leaves an element out leaves what lay there.
    """
    names = dict(zip(region.sizes, sizes, strict=True))
    device = inputs[0].device if inputs else torch.device("cpu")
    buffers = [
        _poisoned([resolve(d, names, schedule) for d in b.shape], getattr(torch, b.dtype), device)
        for b in region.buffers
    ]
    for part in region.parts:
        evaluation = Evaluation(part, inputs, names)
        for store in stored(evaluation):
            _store(buffers[store.buffer], store, evaluation, names)
    return buffers


def stored(evaluation: Evaluation) -> tuple[Store, ...]:
    """Return what a part stores: numbers alone where `only_if` does not hold."""
    part = evaluation.part
    if part.only_if is None or evaluation[part.only_if].all():
        return part.stores
    return tuple(s for s in part.stores if part.stored_extent(s) == NUMBER)


def _poisoned(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of bytes 0xFF, which are NaN in every floating-point format."""
    made = torch.empty(shape, dtype=dtype, device=device)
    made.view(-1).view(torch.uint8).fill_(0xFF)
    return made


class Evaluation:
    """The values of a part, computed when asked for. `given` replaces some: to compare two executors step by step."""

    def __init__(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        sizes: Mapping[str, int],
        given: Mapping[int, Tensor] | None = None,
    ):
        self.part, self.inputs, self.sizes = part, inputs, sizes
        self.rows: int = number_of(part.rows, sizes)
        self._known: dict[int, Any] = dict(given or {})

    def __getitem__(self, i: int) -> Any:
        if i not in self._known:
            self._known[i] = self._compute(i, self.part.values[i])
        return self._known[i]

    def _compute(self, i: int, value: Value) -> Any:
        if value.op == "constant":
            return torch.tensor(value.params[0], dtype=torch.float32, device=self._device()).reshape(1, 1)
        if value.op == "load":
            return self._load(self.part.inputs[value.params[0]])
        if value.op == "load_max":
            x = self.inputs[self.part.inputs[value.params[0]].tensor]
            largest = x.amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
            return largest.reshape(1, 1)
        if value.op == "random":
            seed = self[value.args[0]]
            return uniform(int(seed), self._positions(value.params[0], value.params[1]))
        if value.op in ROW_REDUCTIONS or value.op.endswith(("amax", "sum")):
            return self._reduce(value)
        extent = join(self.part.extents[a] for a in value.args)
        args = [self.spread(a, extent) for a in value.args]
        if value.op == "quantize":
            return (args[0] / args[1]).clamp(-_limit(value), _limit(value)).to(FORMATS[value.params[0]].dtype)
        return OPERATIONS[value.op].torch(*args, *value.params)

    def _device(self) -> torch.device:
        return self.inputs[0].device if self.inputs else torch.device("cpu")

    def _load(self, spec: Input) -> Tensor:
        width = self.part.cols // len(spec.tensors)
        found = [self._load_from(self.inputs[t], spec, width) for t in spec.tensors]
        return torch.cat(found, 1) if spec.beside else found[0]

    def _load_from(self, tensor: Tensor, spec: Input, width: int) -> Tensor:
        """Return what one argument holds of `width` columns."""
        rows, cols = spec.extent
        row_digits = self._digits(spec.rows[:-1] if rows > 1 else spec.rows) if rows else []
        col_digits = self._digits(spec.cols[:-1] if cols > 1 else spec.cols) if cols else []
        strided = torch.as_strided(
            tensor,
            [size for size, _ in (*row_digits, *col_digits)],
            [stride for _, stride in (*row_digits, *col_digits)],
            tensor.storage_offset() + spec.offset,
        )
        shape = (ceil_div(self.rows, rows) if rows else 1, ceil_div(width, cols) if cols else 1)
        x = strided.reshape(shape)
        return x if x.dtype == torch.bool else x.float() if x.dtype.is_floating_point else x

    def _digits(self, digits: Digits) -> list[tuple[int, int]]:
        return [(number_of(size, self.sizes), number_of(stride, self.sizes)) for size, stride in digits]

    def _positions(self, rows: Digits, cols: Digits) -> Tensor:
        r = _index(torch.arange(self.rows, device=self._device(), dtype=torch.int64), self._digits(rows))
        c = _index(torch.arange(self.part.cols, device=self._device(), dtype=torch.int64), self._digits(cols))
        return r[:, None] + c[None, :]

    def spread(self, i: int, extent: tuple[int, int]) -> Any:
        """Return value `i`, repeated where its groups are coarser than `extent`; what does not vary stays 1 long."""
        x = self[i]
        lengths = (self.rows, self.part.cols)
        for dim, (have, want) in enumerate(zip(self.part.extents[i], extent, strict=True)):
            if have > 1 and have != want:
                x = x.repeat_interleave(have // max(want, 1), dim).narrow(dim, 0, ceil_div(lengths[dim], max(want, 1)))
        return x

    def _reduce(self, value: Value) -> Tensor:
        rows, cols = self.part.extents[value.args[0]]
        x = self.spread(value.args[0], (min(rows, 1), min(cols, 1)))
        shape = (self.rows, self.part.cols)
        if value.op in ROW_REDUCTIONS:
            return REDUCTIONS[value.op].torch(x.expand(x.shape[0], shape[1]))
        if value.op == "all_amax":
            return x.abs().amax().reshape(1, 1)
        if value.op == "col_sum":
            bands = value.params[0] if value.params else 1
            return x.expand(shape).reshape(bands, -1, shape[1]).sum(1)
        if value.op == "col_amax":
            return x.expand(shape).abs().amax(0, keepdim=True)
        return _grouped_amax(x.expand(shape).abs(), value)


def _grouped_amax(x: Tensor, value: Value) -> Tensor:
    """Return maxima of groups along rows, along columns, or of blocks; x holds no negative values."""
    down, across = (value.params[0] if grouped else 1 for grouped in GROUP_REDUCTIONS[value.op])
    rows, cols = (round_up(n, m) for n, m in zip(x.shape, (down, across), strict=True))
    x = torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))
    return x.reshape(rows // down, down, cols // across, across).amax((1, 3))


def _limit(value: Value) -> float:
    return FORMATS[value.params[0]].max


def _index(position: Tensor, digits: Sequence[tuple[int, int]]) -> Tensor:
    index = torch.zeros_like(position)
    for n, (size, stride) in enumerate(reversed(digits)):
        last = n == len(digits) - 1
        index = index + (position if last else position % size) * stride
        position = position // size
    return index


def _store(buffer: Tensor, store: Store, evaluation: Evaluation, sizes: Mapping[str, int]) -> None:
    part = evaluation.part
    x = evaluation[store.value]
    if part.values[store.value].op in ("all_amax", "col_sum", "col_amax"):
        results = x.reshape(-1, *buffer.shape[1:])  # one for each band
        buffer.zero_()
        buffer.unflatten(0, (len(results), -1))[:, 0] = results
        return
    rows, cols = part.stored_extent(store)
    lengths = ((evaluation.rows, rows, store.row_multiple), (part.cols, cols, store.col_multiple))
    shape = [ceil_div(n, step) if step else 1 for n, step, _ in lengths]
    filled = [ceil_div(round_up(n, multiple), step) if step else 1 for n, step, multiple in lengths]
    x = x.expand(shape)
    if filled != shape:
        x = _with_zeros(x, filled)
    if store.transposed:
        x = x.t()
    target = torch.as_strided(
        buffer, x.shape, (number_of(store.lead, sizes), 1), buffer.storage_offset() + number_of(store.offset, sizes)
    )
    target.copy_(x)


def _with_zeros(x: Tensor, shape: list[int]) -> Tensor:
    """Return x in the first rows and columns of zeros of this shape."""
    padded = x.new_zeros(shape)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded
