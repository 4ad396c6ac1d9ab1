"""Trying a generated kernel out: random data, the reference's results, what differs, and how fast it is.

A kernel agrees with the reference if every element it stores lies in

    [cast(reference − bound), cast(reference + bound)]          cast to the buffer's dtype, saturated for FP8

where `bound` (`kernels/check/error_bounds.py`) is what rounding explains. It is 0 for most values: then bits must be
equal. Where it is not, an FP8 code may be the neighbouring one only if the quotient lies within the bound of the
midpoint between the two: for a handful of roundings of 2^-24 each, about 2^-20 of it, and never further without a
cancellation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import FP8_DTYPES, ceil_div, round_up
from fp8compile.kernels.check.error_bounds import Bounds
from fp8compile.kernels.check.trial_sizes import pick_sizes
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.tiling import Schedule, Tiling, resolve
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.reductions import REDUCTIONS
from fp8compile.kernels.codegen.spec.region import (
    GROUP_REDUCTIONS,
    PARTIALS,
    ROW_REDUCTIONS,
    Buffer,
    Part,
    Region,
    Store,
    number_of,
)
from fp8compile.kernels.reference.region_reference import Evaluation, stored

POISON = 0xA5  # what no kernel computes by chance, in any dtype
GUARD = 1 << 16  # bytes before and after a buffer
RUN = 16  # random data changes its magnitude every so many elements
SPECIAL = (float("inf"), float("-inf"), float("nan"), 1e-40, -0.0, 3e38)
STATISTICS = (*ROW_REDUCTIONS, *GROUP_REDUCTIONS, "scale", "scale_power_of_two", "load_max")
# Operations that leave the sign of a zero open: max(-0, 0) is either, and so is a sum's zero in another order.
ANY_ZERO = {op for op, row in (OPERATIONS | REDUCTIONS).items() if row.any_zero}


# ---- data -----------------------------------------------------------------------------------------------------------


def random_inputs(region: Region, sizes: Sequence[int], seed: int, device: str) -> list[Tensor]:
    """Return a flat tensor for each argument, just big enough. Normal numbers of magnitudes 2^-6 to 2^6, and some runs
    of zeros; every fourth seed adds infinities, nan, a subnormal number, -0 and one near the largest."""
    names = dict(zip(region.sizes, sizes, strict=True))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in range(region.tensors):
        uses = [i for part in region.parts for i in part.inputs if tensor in i.tensors]
        count = max((i.reach(names) for i in uses), default=0)
        dtype = getattr(torch, uses[0].dtype) if uses else torch.float32
        x = _random(count, dtype, _holds_maxima(region, tensor), seed % 4 == 3, generator)
        found.append(x.to(device))
    return found


def _holds_maxima(region: Region, tensor: int) -> bool:
    readers = [
        value.op
        for part in region.parts
        for value in part.values
        if value.op in ("load", "load_max") and tensor in part.inputs[value.params[0]].tensors
    ]
    return bool(readers) and set(readers) == {"load_max"}


def _random(count: int, dtype: torch.dtype, maxima: bool, special: bool, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    if dtype == torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64, device="cpu")
    x = torch.randn(count, dtype=torch.float32, generator=generator, device="cpu")
    if maxima:
        return x.abs().to(dtype)
    runs = ceil_div(count, RUN)
    magnitude = torch.randint(-6, 7, (runs,), generator=generator, dtype=torch.int64, device="cpu").float().exp2()
    magnitude[torch.rand(runs, generator=generator, dtype=torch.float32, device="cpu") < 0.05] = 0
    x *= magnitude.repeat_interleave(RUN)[:count]
    if special and count:
        where = torch.randint(0, count, (len(SPECIAL),), generator=generator, dtype=torch.int64, device="cpu")
        x[where] = torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")
    return x.to(dtype)


# ---- running --------------------------------------------------------------------------------------------------------


def check(kernel: Any, region: Region, schedule: Schedule, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[str]:
    """Run `kernel` into poisoned buffers with guards around them; return a line for each thing that is wrong."""
    names = dict(zip(region.sizes, sizes, strict=True))
    device = inputs[0].device if inputs else torch.device("cpu")
    memory = [_guarded(buffer, names, schedule, device) for buffer in region.buffers]
    buffers = [inner for _, inner in memory]
    with torch.cuda.device_of(buffers[0]):
        kernel[(schedule.programs,)](*inputs, *buffers, *sizes, num_warps=schedule.warps)
    lines = [
        f"y{i}: written outside of it"
        for i, (outer, _) in enumerate(memory)
        if not ((outer[:GUARD] == POISON).all() and (outer[-GUARD:] == POISON).all())
    ]
    return lines + compare(region, schedule, inputs, sizes, buffers)


def _guarded(buffer: Buffer, names: dict[str, int], schedule: Schedule, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (memory, the buffer inside of it)."""
    shape = [resolve(d, names, schedule) for d in buffer.shape]
    dtype = getattr(torch, buffer.dtype)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((GUARD + size + GUARD,), POISON, dtype=torch.uint8, device=device)
    return memory, memory[GUARD : GUARD + size].view(dtype).view(shape)


# ---- comparing ------------------------------------------------------------------------------------------------------


def compare(
    region: Region, schedule: Schedule, inputs: Sequence[Tensor], sizes: Sequence[int], buffers: Sequence[Tensor]
) -> list[str]:
    """Return how `buffers`, a kernel's results, differ from the reference: a line for each store that does.

    Statistics (reductions, scales) that the kernel stored are taken as given for what depends on them, so that scales
    are equal, and each is judged by itself, given those before it.
    """
    names = dict(zip(region.sizes, sizes, strict=True))
    lines = []
    for number, (part, tiling) in enumerate(zip(region.parts, schedule.tilings, strict=True)):
        given = {
            s.value: _stored(buffers[s.buffer], s, part, names)
            for s in part.stores
            if region.buffers[s.buffer].dtype == "float32" and part.values[s.value].op in STATISTICS
        }
        judge = _Judge(part, tiling, inputs, names, given)
        for store in stored(Evaluation(part, inputs, names, given)):
            complaint = judge.complaint(store, buffers[store.buffer])
            if complaint:
                lines.append(f"part {number}, y{store.buffer} = v{store.value} ({_op(part, store)}): {complaint}")
    return lines


def _op(part: Part, store: Store) -> str:
    return part.values[store.value].op


def _stored(buffer: Tensor, store: Store, part: Part, names: Mapping[str, int], padded: bool = False) -> Tensor:
    """Return the elements that `store` left in `buffer`, rows first; `padded` with the zeros that it appends."""
    lead = number_of(store.lead, names)
    strides = (1, lead) if store.transposed else (lead, 1)
    offset = buffer.storage_offset() + number_of(store.offset, names)
    return torch.as_strided(buffer, _shape(store, part, names, padded), strides, offset)


def _shape(store: Store, part: Part, names: Mapping[str, int], padded: bool) -> tuple[int, int]:
    """Return how many rows and columns, in its extent, `store` writes."""
    rows, cols = part.stored_extent(store)
    height, width = number_of(part.rows, names), part.cols
    if padded:
        height, width = round_up(height, store.row_multiple), round_up(width, store.col_multiple)
    return ceil_div(height, rows) if rows else 1, ceil_div(width, cols) if cols else 1


class _Judge:
    """Judges the stores of one part."""

    def __init__(
        self, part: Part, tiling: Tiling, inputs: Sequence[Tensor], names: Mapping[str, int], given: dict[int, Tensor]
    ):
        self.part, self.tiling, self.inputs, self.names, self.given = part, tiling, inputs, names, given
        self.all_given = self._sides(given)

    def _sides(self, given: dict[int, Tensor]) -> tuple[Evaluation, Bounds]:
        values = Evaluation(self.part, self.inputs, self.names, given)
        on_gpu = any(x.is_cuda for x in self.inputs)
        return values, Bounds(values, self.tiling, given, on_gpu)

    def complaint(self, store: Store, buffer: Tensor) -> str:
        """Return how the elements that `store` left in `buffer` are wrong; "" if they are right."""
        i = store.value
        values, bounds = self.all_given
        if i in self.given:
            values, bounds = self._sides({j: x for j, x in self.given.items() if j != i})
        op = self.part.values[i].op
        if op in PARTIALS:
            bands = len(values[i]) if op == "col_sum" else 1
            found = buffer.unflatten(0, (bands, -1))
            actual = found.double().sum(1).float() if op == "col_sum" else found.amax(1)
            return _difference(actual.reshape(values[i].shape), values[i].double(), bounds[i], _float, False)
        actual = _stored(buffer, store, self.part, self.names, padded=True)
        exact, bound = bounds.quotient(i) if op == "quantize" else (values[i], bounds[i])
        exact, bound = (self._padded(x.double(), store) for x in (exact, bound))
        return _difference(actual, exact, bound, partial(_cast, dtype=actual.dtype), self._signs_zeros(i))

    def _padded(self, x: Tensor, store: Store) -> Tensor:
        """Return x over all that `store` writes: repeated where it does not vary, then zeros appended."""
        rows, cols = _shape(store, self.part, self.names, padded=False)
        height, width = _shape(store, self.part, self.names, padded=True)
        return torch.nn.functional.pad(x.expand(rows, cols), (0, width - cols, 0, height - rows))

    def _signs_zeros(self, i: int) -> bool:
        """Return True if the sign of a zero is determined."""
        value = self.part.values[i]
        return value.op not in ANY_ZERO and all(map(self._signs_zeros, value.args))


def _float(x: Tensor) -> Tensor:
    return x


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (FP64) cast to `dtype`, as FP64."""
    if dtype == torch.bool:
        return (x > 0.5).double()  # 0 or 1, give or take a bound of 0 or 1
    x = x.float()  # registers are FP32
    if dtype in FP8_DTYPES:
        limit = FP8_DTYPES[dtype].max
        x = x.clamp(-limit, limit)
    return x.to(dtype).double()


def _difference(
    actual: Tensor, exact: Tensor, bound: Tensor, cast: Callable[[Tensor], Tensor], signed_zeros: bool
) -> str:
    """Return where `actual` is not within `bound` of `exact`; of nan, any code is right."""
    got = actual.view(torch.uint8).double() if actual.dtype == torch.bool else actual.double()
    low, high = cast(exact - bound), cast(exact + bound)
    fine = (low <= got) & (got <= high) | (exact.isnan() & got.isnan()) | bound.isinf()
    if signed_zeros:
        zero = (got == 0) & (bound == 0)
        fine &= ~zero | (got.signbit() == cast(exact).signbit())
    wrong = (~fine).nonzero()
    if not len(wrong):
        return ""
    r, c = wrong[0].tolist()
    expected, got_there = cast(exact)[r, c].item(), got[r, c].item()
    return (
        f"{len(wrong)} of {fine.numel()} differ, first at [{r}, {c}]: {got_there!r} for {expected!r}"
        f" ({exact[r, c].item()!r} ± {bound[r, c].item():.3g})"
    )


# ---- a generated file's main ----------------------------------------------------------------------------------------


def main(kernel: Any, spec_text: str, schedule_text: str) -> None:
    """Check `kernel` on random data and time it; exits with 1 if it is wrong, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("This checks a CUDA kernel against its reference, and needs a GPU with FP8: torch finds none here.")
        sys.exit(2)
    import triton.testing

    region, schedule = generated.parse(spec_text.strip(), schedule_text.strip())
    names = pick_sizes(region)
    sizes = [names[n] for n in region.sizes]
    inputs = random_inputs(region, sizes, 0, "cuda")
    wrong = check(kernel, region, schedule, inputs, sizes)
    print("\n".join(wrong) or "ok")
    buffers = generated.empty_buffers(region, schedule, sizes, inputs[0])
    run = partial(kernel[(schedule.programs,)], *inputs, *buffers, *sizes, num_warps=schedule.warps)
    milliseconds: Any = triton.testing.do_bench(run, return_mode="median")  # by CUDA events, the cache flushed
    size = sum(sum(generated.moved(part, region, names).values()) for part in region.parts)
    print(f"{size / 1e6:.3f} MB in {milliseconds * 1e3:.1f} us: {size / milliseconds / 1e6:.0f} GB/s")
    sys.exit(1 if wrong else 0)
