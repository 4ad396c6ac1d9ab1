"""Memory that nobody has written is NaN in every process of the tests: what reads it gets caught.

    poison()                      once a process, before the first test
    poisoned_allocations(byte)    another byte in what Inductor's code allocates, while this lasts

On a CPU the C library fills what it hands out; on a GPU the buffers of compiled code are filled as Inductor makes them,
and `poison_free_memory` fills what the allocator will hand out next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # tracing allocates nothing

M_PERTURB = -6  # glibc: what malloc returns is filled with the complement of this byte, what is freed with the byte
TUNABLES = "glibc.malloc.tcache_count=0"  # a thread's cache hands some blocks out as they were, 1 in 10,000
NAN, LARGE = 0xFF, 0x7E  # bytes: NaN in all floats, -1 in ints; 448 in E4M3, NaN in E5M2, 8e37 in BF16 and FP32
SHARE = 0.7  # of a GPU's free memory that is filled
EACH = 8  # blocks of a size
ALLOCATORS = ("_empty_strided_cpu", "_empty_strided_cuda")  # of Inductor's code


def poison() -> None:
    """Fill what is allocated from now on; in processes that this one starts, as pytest's workers, all of it."""
    os.environ.setdefault("GLIBC_TUNABLES", TUNABLES)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc reads the lowest byte, and takes 0 alone for "off"
        libc.mallopt(M_PERTURB, 0x100 | (NAN ^ 0xFF))
    guards: Any = torch._C._dynamo.guards
    if torch.cuda.is_available() and not hasattr(guards._empty_strided_cuda, "allocates"):
        guards._empty_strided_cuda = _filled(guards._empty_strided_cuda, NAN)


@contextlib.contextmanager
def poisoned_allocations(byte: int) -> Iterator[None]:
    """Fill what Inductor's code allocates with `byte`."""
    guards: Any = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for name in ALLOCATORS:
            if hasattr(guards, name):
                stack.enter_context(mock.patch.object(guards, name, _filled(getattr(guards, name), byte)))
        yield


def _filled(allocate: Any, byte: int) -> Any:
    def filled(*args: Any) -> Tensor:
        return fill(allocate(*args), byte)

    filled.allocates = allocate  # type: ignore[attr-defined]
    return filled


def fill(x: Tensor, byte: int = NAN) -> Tensor:
    """`x`; all of the memory that it lies in is filled, whatever its strides."""
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        return x
    memory = torch.empty(0, dtype=torch.uint8, device=x.device)
    memory.set_(x.untyped_storage()).fill_(byte)  # type: ignore[call-overload]
    return x


def poison_free_memory(byte: int = NAN, largest: int = 1 << 27) -> None:
    """Fill what the GPU's allocator will hand out next: blocks up to `largest`, and one that others are cut from.

    The allocator keeps lists of blocks by their sizes, so several of each size are filled.
    """
    free, _ = torch.cuda.mem_get_info()
    sizes = [1 << n for n in range(9, largest.bit_length())]
    small = [torch.full((size,), byte, dtype=torch.uint8, device="cuda") for size in sizes for _ in range(EACH)]
    large = torch.full((min(int(free * SHARE), EACH * largest),), byte, dtype=torch.uint8, device="cuda")
    del small, large
