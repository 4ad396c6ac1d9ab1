"""Memory that nobody has written holds nan, or the largest numbers: what reads it shows.

Buffers of generated kernels have guards around them as well, and what Inductor allocates is filled. On a GPU, what
torch's caching allocator hands out otherwise has been filled before: by tensors that were freed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # tracing allocates nothing

NAN, LARGE = 0xFF, 0x7E  # bytes: of nan in all formats; of 448 in E4M3, nan in E5M2, 8e37 in BF16 and FP32
CACHED = (1 << 9, 1 << 12, 1 << 16, 1 << 19, 1 << 20, 1 << 22, 1 << 25)  # sizes of blocks that are filled


def fill(x: Tensor, byte: int) -> Tensor:
    """`x`, all bytes of its memory set to `byte`."""
    if isinstance(x, FakeTensor) or x.device.type == "meta" or x.numel() == 0:
        return x
    flat = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    flat.view(torch.uint8).fill_(byte)
    return x


def fill_cached_memory(byte: int) -> None:
    """Fill what the GPU's caching allocator will hand out next."""
    held = [torch.empty(n, dtype=torch.uint8, device="cuda").fill_(byte) for n in CACHED for _ in range(8)]
    del held


@contextlib.contextmanager
def poisoned_allocations(byte: int) -> Iterator[None]:
    """Fill what Inductor's code allocates."""
    guards: Any = torch._C._dynamo.guards
    names = [n for n in ("_empty_strided_cpu", "_empty_strided_cuda") if hasattr(guards, n)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(guards, name, _filled(getattr(guards, name), byte)))
        yield


def _filled(allocate: Any, byte: int) -> Any:
    return lambda *args: fill(allocate(*args), byte)
