"""A launch that is made again and again for the same parameters: what does not change is kept, on the device.

    launch = BoundLaunch(spec, stored, read)        once
    launch(matrix)                                  updates all parameters
    launch.read_again(column, tensors)              of one tensor that each parameter has, others: new gradients

`update_launch.launch` does the same for tensors that may be others each time, and asks each of them where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing, keep
from fp8compile.kernels.optimizer.emit_update import ALIGNMENT, columns
from fp8compile.kernels.optimizer.known_launch import KnownLaunch
from fp8compile.kernels.optimizer.update_launch import SCHEDULE, blocks_of, kernel_of, pinned
from fp8compile.kernels.optimizer.update_spec import from_json


class BoundLaunch:
    """Tables of some parameters. `stored` and `read` are flat, parameter by parameter, as the operator takes them."""

    def __init__(self, spec: str, stored: Sequence[Tensor], read: Sequence[Tensor], target: str = "cuda") -> None:
        self.update, self.target, self.device = from_json(spec), target, stored[0].device
        self.wide, self.narrow = (self.update.width(x) for x in (self.update.stored, self.update.read))
        self.kernel = KnownLaunch(kernel_of(self.update, SCHEDULE, target), options=SCHEDULE.options(target))
        self.sizes = [x.numel() for x in stored[:: self.wide]]
        count = len(self.sizes)
        addresses = torch.empty(count, self.wide + self.narrow, dtype=torch.int64)
        addresses[:, : self.wide] = _addresses(stored).view(count, self.wide)
        addresses[:, self.wide :] = _addresses(read).view(count, self.narrow)
        self.addresses = addresses  # on the host
        self.table = addresses.to(self.device)
        self.blocks = blocks_of(self.sizes, SCHEDULE).to(self.device)
        self.lie: dict[int, list[int]] = {}  # what was read last, by column
        self.active: tuple[bool, ...] = (True,) * count
        self.active_sizes = torch.tensor(self.sizes, dtype=torch.int64, device=self.device)
        self.no_numbers = torch.zeros(1, device=self.device)
        assert len(columns(self.update)) == self.wide + self.narrow

    def read_again(self, column: int, addresses: list[int]) -> None:
        """Let tensor `column` of those that are read lie at these addresses, one a parameter."""
        if addresses == self.lie.get(column):
            return
        self.addresses[:, self.wide + column] = torch.tensor(addresses, dtype=torch.int64)
        on_host = pinned(self.addresses, self.device)
        self.table = on_host.to(self.device, non_blocking=True)
        if is_capturing():  # nothing is copied before the graph runs
            self.lie.pop(column, None)
        else:
            self.lie[column] = addresses

    def update_only(self, active: tuple[bool, ...]) -> None:
        """Leave parameters out that have no gradient in this step: they have no elements."""
        if active != self.active:
            sizes = [size if wanted else 0 for size, wanted in zip(self.sizes, active, strict=True)]
            self.active, self.active_sizes = active, torch.tensor(sizes, dtype=torch.int64, device=self.device)

    def __call__(self, matrix: Tensor | None) -> None:
        """Update the parameters; `matrix`: their numbers, FP32 on the device, with a row a parameter or more rows."""
        if not len(self.blocks):
            return
        keep(self.table, self.active_sizes, self.blocks, self.no_numbers)
        numbers = self.no_numbers if matrix is None else matrix
        widths = self.wide + self.narrow, len(self.update.scalars)
        arguments = self.table, self.active_sizes, self.blocks, numbers, *widths
        self.kernel(len(self.blocks), *arguments)


def is_usable(x: Tensor) -> bool:
    """Return True if a kernel can take `x` where it lies."""
    return x.is_contiguous() and (x.data_ptr() % ALIGNMENT == 0 or x.numel() == 1)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64)
