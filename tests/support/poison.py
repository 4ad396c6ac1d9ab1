"""Uninitialised memory is NaN in every process of the tests: what reads an element that nobody wrote gets caught.

    poison()    once a process, before the first test

On a CPU the C library fills what it hands out; on a GPU the buffers of compiled code are filled as Inductor makes them,
and `poison_free_memory` fills what the allocator will hand out next. Bytes of 0xFF are NaN in every float, -1 in ints.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

M_PERTURB = -6  # glibc: what malloc returns is filled with the complement of this byte, what is freed with the byte
NAN_BYTE = 0xFF
SHARE = 0.7  # of a GPU's free memory that is filled


def poison() -> None:
    """Fill what is allocated from now on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc reads the lowest byte, and takes 0 alone for "off"
        libc.mallopt(M_PERTURB, 0x100 | (NAN_BYTE ^ 0xFF))
    guards: Any = torch._C._dynamo.guards  # where Inductor's code takes its allocator from
    if torch.cuda.is_available() and not hasattr(guards._empty_strided_cuda, "allocates"):
        guards._empty_strided_cuda = _filled(guards._empty_strided_cuda)


def _filled(allocate: Any) -> Any:
    def empty_strided_cuda(*args: Any) -> torch.Tensor:
        x = allocate(*args)
        fill(x)
        return x

    empty_strided_cuda.allocates = allocate  # type: ignore[attr-defined]
    return empty_strided_cuda


def fill(x: torch.Tensor) -> None:
    """Fill all of the memory that `x` lies in, whatever its strides."""
    memory = torch.empty(0, dtype=torch.uint8, device=x.device)
    memory.set_(x.untyped_storage()).fill_(NAN_BYTE)  # type: ignore[call-overload]


def poison_free_memory() -> None:
    """Fill what the GPU's allocator will hand out next: blocks of many sizes, of which it keeps lists of its own."""
    free, _ = torch.cuda.mem_get_info()
    sizes = [1 << n for n in range(9, 28)]
    small = [torch.full((size,), NAN_BYTE, dtype=torch.uint8, device="cuda") for size in sizes for _ in range(8)]
    large = torch.full((int(min(free * SHARE, 1 << 30)),), NAN_BYTE, dtype=torch.uint8, device="cuda")
    del small, large
