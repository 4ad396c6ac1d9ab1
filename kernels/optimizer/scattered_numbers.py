"""Numbers that lie in tensors of their own, one a parameter: one launch reads them into a vector, or counts them.

torch.stack and torch._foreach_add_ ask each tensor on the host, in every step. Here their addresses are a table on the
device, made once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.cuda_capture import keep
from fp8compile.formats import ceil_div
from fp8compile.kernels.optimizer.known_launch import KnownLaunch

BLOCK = 256


class ScatteredNumbers:
    """Some tensors of one element and one dtype, on a GPU.

    order: which of them a vector holds, in which order; each may be there again. Without it: all as they come.
    """

    def __init__(self, tensors: Sequence[Tensor], order: Sequence[int] | None = None) -> None:
        first = tensors[0]
        addresses = torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, device="cpu")
        self.table = addresses.to(first.device)
        self.read_table = self.table if order is None else addresses[list(order)].to(first.device)
        self.like = torch.zeros(1, dtype=first.dtype, device=first.device)
        self.launch_read, self.launch_add = KnownLaunch(read_numbers, (BLOCK,)), KnownLaunch(add_to_numbers, (BLOCK,))
        self.launch_add.compile_ahead(self.table, self.like, self.like, 1.0 if first.is_floating_point() else 1, 1)

    def vector(self, length: int) -> Tensor:
        """Return the numbers, and the first one again and again up to `length`."""
        keep(self.read_table, self.like)
        found = torch.empty(length, dtype=self.like.dtype, device=self.like.device)
        self.launch_read(ceil_div(length, BLOCK), self.read_table, found, len(self.read_table), length)
        return found

    def add(self, by: float, unless: Tensor | None = None) -> None:
        """Add `by` to each number; nothing where `unless`, a number on the device, is not 0."""
        keep(self.table, self.like)
        count = len(self.table)
        skip = self.like if unless is None else unless  # `like` is 0
        self.launch_add(ceil_div(count, BLOCK), self.table, self.like, skip, by, count)


def are_scattered(tensors: Sequence[Tensor]) -> bool:
    """Return True if a launch can read and count these: plain tensors of a GPU, each with a place of its own."""
    first = tensors[0]
    alike = (type(x) is Tensor and x.numel() == 1 and x.device == first.device for x in tensors)
    return (
        first.is_cuda
        and all(alike)
        and {x.dtype for x in tensors} == {first.dtype}
        and len({x.data_ptr() for x in tensors}) == len(tensors)
    )


def compile_reading(device: torch.device) -> None:
    """Begin to compile what reads numbers in FP32, which the function of them is compiled with."""
    table, like = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device, dtype=torch.float32)
    KnownLaunch(read_numbers, (BLOCK,)).compile_ahead(table, like, 1, 1)


@triton.jit(do_not_specialize=["count", "length"])
def read_numbers(table, found, count, length, BLOCK: tl.constexpr):  # noqa: N803
    """found[i] = the number at table[i]; beyond `count` that at table[0]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(table + tl.where(i < count, i, 0), mask=i < length, other=0)
    number = tl.load(address.to(found.dtype), mask=i < length)
    tl.store(found + i, number, mask=i < length)


@triton.jit(do_not_specialize=["by", "count"])
def add_to_numbers(table, like, unless, by, count, BLOCK: tl.constexpr):  # noqa: N803
    """Add `by` to the number at table[i], of the dtype of `like`, if `unless` is 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < count) & (tl.load(unless) == 0)
    place = tl.load(table + i, mask=mask, other=0).to(like.dtype)
    number = tl.load(place, mask=mask)
    tl.store(place, (number + by).to(number.dtype), mask=mask)
