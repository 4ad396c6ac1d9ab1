"""A launch that is made again and again for the same parameters: what does not change is kept, on the device.

    launch = BoundLaunch(spec, stored, read)        once
    tables = AddressTables([launch, …])             of some launches, sent in one copy
    tables.read_again(addresses)                    new gradients, new settings
    launch(matrix)                                  updates all parameters

`update_launch.launch` does the same for tensors that may be others each time, and asks each of them where it lies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing, keep
from fp8compile.kernels.optimizer.emit_update import ALIGNMENT, columns
from fp8compile.kernels.optimizer.known_launch import KnownLaunch
from fp8compile.kernels.optimizer.memory_order import lies_as, transposed_matrices
from fp8compile.kernels.optimizer.update_launch import blocks_of, kernel_of, pinned, schedule_of
from fp8compile.kernels.optimizer.update_spec import Update, from_json


class BoundLaunch:
    """Tables of some parameters. `stored` and `read` are flat, parameter by parameter, as the operator takes them.

    matrices: of each parameter, if they lie transposed (`memory_order.py`).
    """

    def __init__(
        self,
        spec: str,
        stored: Sequence[Tensor],
        read: Sequence[Tensor],
        target: str = "cuda",
        matrices: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.update, self.target, self.device = from_json(spec), target, stored[0].device
        self.wide, self.narrow = (self.update.width(x) for x in (self.update.stored, self.update.read))
        schedule = schedule_of(self.update)
        kernel = kernel_of(self.update, schedule, target, matrices is not None)
        self.kernel = KnownLaunch(kernel, options=schedule.options(target))
        self.matrices: tuple[Tensor, ...] = ()  # one more argument of the kernel, or none
        if matrices is not None:
            self.matrices = (torch.tensor(matrices, dtype=torch.int32, device=self.device),)
        self.sizes = [x.numel() for x in stored[:: self.wide]]
        count = len(self.sizes)
        addresses = torch.empty(count, self.wide + self.narrow, dtype=torch.int64, device="cpu")
        addresses[:, : self.wide] = _addresses(stored).view(count, self.wide)
        addresses[:, self.wide :] = _addresses(read).view(count, self.narrow)
        self.addresses = addresses  # on the host
        self.table = addresses.to(self.device)
        self.blocks = blocks_of(self.sizes, schedule).to(self.device)
        self.active: tuple[bool, ...] = (True,) * count
        self.active_sizes = torch.tensor(self.sizes, dtype=torch.int64, device=self.device)
        self.no_numbers = torch.zeros(1, dtype=torch.float32, device=self.device)
        assert len(columns(self.update)) == self.wide + self.narrow
        if len(self.blocks):
            self.kernel.compile_ahead(*self._arguments(self.no_numbers))

    def update_only(self, active: tuple[bool, ...]) -> None:
        """Leave parameters out that have no gradient in this step: they have no elements."""
        if active != self.active:
            sizes = [size if wanted else 0 for size, wanted in zip(self.sizes, active, strict=True)]
            self.active, self.active_sizes = active, torch.tensor(sizes, dtype=torch.int64, device=self.device)

    def __call__(self, matrix: Tensor | None) -> None:
        """Update the parameters; `matrix`: their numbers, FP32 on the device, with a row a parameter or more rows."""
        if not len(self.blocks):
            return
        keep(self.table, self.active_sizes, self.blocks, self.no_numbers, *self.matrices)
        self.kernel(len(self.blocks), *self._arguments(self.no_numbers if matrix is None else matrix))

    def _arguments(self, numbers: Tensor) -> tuple[Any, ...]:
        widths = self.wide + self.narrow, len(self.update.scalars)
        return self.table, self.active_sizes, self.blocks, numbers, *self.matrices, *widths


class AddressTables:
    """The tables of launches on one device, which read one tensor or none of each parameter: its gradient.

    settings: how many numbers in 64 bits are sent along; `numbers` has where they lie on the device. What was sent lies
    in the same memory in each step, but for steps that a CUDA graph captures: such a graph has a table of its own.
    """

    def __init__(self, launches: Sequence[BoundLaunch], settings: int = 0) -> None:
        self.launches, self.device, self.settings = launches, launches[0].device, settings
        host = array("q")
        self.places: list[tuple[slice, int]] = []  # of what is read anew, and how many, launch by launch
        self.lengths: list[int] = []
        for x in launches:
            assert x.narrow <= 1
            start = len(host)
            host.extend(x.addresses.flatten().tolist())
            if x.narrow:
                self.places.append((slice(start + x.wide, len(host), x.wide + x.narrow), len(x.sizes)))
            host.extend([0] * (len(host) % 2))  # the next one is aligned
            self.lengths.append(len(host) - start)
        self.lengths.append(settings)
        host.extend([0] * settings)
        self.addresses = torch.frombuffer(host, dtype=torch.int64)  # on the host: the same memory
        self.host = memoryview(host)
        self.host_settings = self.host.cast("B")[8 * (len(host) - settings) :].cast("d")
        self.sent: tuple[list[int], list[float]] | None = None  # what was read last
        self.table = torch.empty_like(self.addresses, device=self.device)
        self.current: Tensor | None = None  # the table that launches read
        self._send()

    def read_again(self, addresses: list[int], settings: Sequence[float] = ()) -> None:
        """Let the gradients lie at these addresses, one a parameter of those that are read, launch by launch."""
        given = addresses, list(settings)
        if given == self.sent:
            return
        start = 0
        for place, count in self.places:
            self.host[place] = array("q", addresses[start : start + count])
            start += count
        self.host_settings[:] = array("d", settings)
        self._send()
        self.sent = None if is_capturing() else given  # nothing is copied before the graph runs

    def _send(self) -> None:
        host = pinned(self.addresses, self.device)
        if is_capturing():
            self._read(torch.empty_like(self.table).copy_(host, non_blocking=True))
        else:
            self._read(self.table.copy_(host, non_blocking=True))

    def _read(self, table: Tensor) -> None:
        """Let launches read this table."""
        if table is not self.current:
            *own, settings = table.split(self.lengths)
            for x, part in zip(self.launches, own, strict=True):
                x.table = part
            self.current, self.numbers = table, settings.view(torch.float64).unbind()


def is_usable(x: Tensor, like: Tensor | None = None) -> bool:
    """Return True if a kernel can take `x` where it lies: contiguous, or as `like` does, which lies transposed."""
    is_ordered = x.is_contiguous() if like is None else lies_as(x, like)
    return is_ordered and (x.data_ptr() % ALIGNMENT == 0 or x.numel() == 1)


def matrices_of(update: Update, stored: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Return the matrices of parameters that lie transposed; None if a launch cannot take what is stored for them."""
    names = [name for i in update.stored for name in update.slots[i].tensors]
    likes = [p if name == "x" else None for p in parameters for name in names]
    found = [transposed_matrices(p) for p in parameters]
    if not all(map(is_usable, stored, likes)):
        return None
    return [x for x in found if x is not None] if None not in found else None


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, device="cpu")
