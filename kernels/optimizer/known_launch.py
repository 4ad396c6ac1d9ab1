"""Launch a kernel again and again without asking each time what its arguments are.

Triton binds, sorts and hashes the arguments of every launch, to find the code that it has compiled for such ones. An
optimizer's step launches the same few kernels with the same few kinds of arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8compile.kernels.optimizer import compile_ahead

ALIGNMENT = 16  # bytes: the only property of an address for which Triton compiles other code, on NVIDIA's GPUs
MOST = 64  # kinds of arguments that are remembered


class KnownLaunch:
    """A Triton function that is launched on the device of its first argument, a tensor, and the stream there.

    constants: the values of its last parameters; options: of its compilation. Only the first launch with arguments of
    a kind runs hooks of the function, and checks the global values that it was compiled with.
    """

    def __init__(
        self, kernel: Any, constants: tuple[int, ...] = (), options: Mapping[str, int | bool] | None = None
    ) -> None:
        self.kernel, self.constants, self.options = kernel, constants, dict(options or {})
        self.known: dict[tuple[Any, ...], Any] = {}  # kinds of arguments → compiled code

    def compile_ahead(self, *arguments: Any) -> None:
        """Begin to compile for arguments like these (`compile_ahead.py`)."""
        compile_ahead.begin(self.kernel, (*arguments, *self.constants), self.options)

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch `programs` programs of the kernel."""
        kinds = tuple(map(_kind, arguments))
        compiled = self.known.get(kinds)
        given = *arguments, *self.constants
        if compiled is None:
            compile_ahead.wait(self.kernel)
        with torch.cuda.device_of(arguments[0]):
            if compiled is not None:
                compiled[(programs, 1, 1)](*given)
                return
            found = self.kernel[(programs,)](*given, **self.options)
        from triton.compiler import CompiledKernel

        if isinstance(found, CompiledKernel) and len(self.known) < MOST:  # the interpreter compiles nothing
            self.known[kinds] = found


def _kind(x: Any) -> Any:
    """Return what Triton compiles code for: dtype, device and alignment of a tensor, the value of an integer, and the
    type alone of another number."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0
    return int(x) if isinstance(x, int) and not isinstance(x, bool) else type(x)
