"""Late hosts: whether the GPU waits for what the host launches, seen in the first steady steps, and said once.

When a forward pass has been launched, a GPU that is busy for longer than the host takes still has work to do; one that
has done everything by then is waiting. Asking it takes the host about a microsecond, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing
from fp8compile.torch_hooks.calls.user_frame import warn_user

SKIPPED, LOOKED_AT = 10, 20  # forward passes of a graph
MOST_BUSY = 0.1  # the share of passes after which a GPU that waits may still have work to do


@dataclass
class Looked:
    """Counts of the looks of this process, at all graphs, and of those that found the GPU idle."""

    looks: int = 0
    idle: int = 0
    is_over: bool = False

    def clear(self) -> None:
        """Begin to count anew."""
        self.looks, self.idle, self.is_over = 0, 0, False


_looked = Looked()


@dataclass
class Looks:
    """The looks at one training graph."""

    calls: int = 0

    def look(self, args: Sequence[Any]) -> bool:
        """See whether the GPU is idle when a forward pass has been launched; return False after the last look.

        args: of the graph; they name the GPU.
        """
        device = None if _looked.is_over else gpu_of(args)
        if device is None:
            return False
        if not torch.is_grad_enabled() or is_capturing():
            return True
        self.calls += 1
        if self.calls <= SKIPPED:
            return True
        _looked.looks += 1
        _looked.idle += is_idle(device)
        if self.calls < SKIPPED + LOOKED_AT:
            return True
        _looked.is_over = True
        if _looked.idle >= (1 - MOST_BUSY) * _looked.looks:
            warn_user(late(_looked.idle, _looked.looks))
        return False


def gpu_of(args: Sequence[Any]) -> torch.device | None:
    """Return the GPU of the first tensor that is on one; None if none is."""
    return next((x.device for x in args if isinstance(x, Tensor) and x.device.type == "cuda"), None)


def is_idle(device: torch.device) -> bool:
    """Return True if a GPU has done all that was launched on its current stream."""
    return torch.cuda.current_stream(device).query()


def late(idle: int, looks: int) -> str:
    """Return what is said of a host that is late."""
    return (
        f"fp8: the GPU waits for the host: {idle} of {looks} forward passes were done as soon as they were launched. "
        "Faster kernels make no such step shorter, a CUDA graph does: options={'mode': 'reduce-overhead'}, or "
        "fp8compile.capture_step for a whole step. `fp8compile doctor --model script.py` shows where the time goes"
    )
