"""Whether a CUDA graph is being captured: then nothing that is launched runs yet, and what it reads has to stay.

A step that is captured later runs as it is before (`capture_step`): what is compiled then is launched by a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_steps: list[bool] = []  # that run now, and are captured or to be captured


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured from the current stream; False without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_to_be_captured() -> bool:
    """Return True within a step of `capture_step`."""
    return bool(_steps)


@contextlib.contextmanager
def to_be_captured() -> Iterator[None]:
    """Say meanwhile that what runs is captured, now or later."""
    _steps.append(True)
    try:
        yield
    finally:
        _steps.pop()
