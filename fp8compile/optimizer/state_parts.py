"""What an 8-bit state consists of, for functions that look at its parts. `FP8State` (`states.py`) is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

INNER = ("payload", "side", "counter", "low")  # names of the parts, in the order of `parts()`


class StateParts(Protocol):
    """The parts of a state, its format, and what is made of them. `states.py` has the meaning of each."""

    payload: Tensor
    side: Tensor
    counter: Tensor | None
    low: Tensor | None
    format: str
    parameter: str
    stored_checksum: int | None
    from_file: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of the payload."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the state has to those who read it."""
        ...

    def dim(self) -> int:
        """Return the number of dimensions."""
        ...

    def parts(self) -> list[Tensor]:
        """Return the tensors that the state is made of."""
        ...

    def like(self, function: Callable[[Tensor], Tensor]) -> Any:
        """Return the same state with `function` applied to each of its tensors."""
        ...

    def rows(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
        """Return some rows of the state, sharing its memory; None where they are not whole groups."""
        ...
