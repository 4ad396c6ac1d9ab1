"""Whether a CUDA graph is being captured: then nothing that is launched runs yet, and what it reads has to stay.

A step that is captured later runs as it is before (`capture_step`): what is compiled then is launched by a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_steps: list[bool] = []  # that run now, and are captured or to be captured
_kept: list[Tensor] = []  # what graphs read that others captured


class _Recordings(threading.local):
    """Hold what the graphs read that this thread records now, innermost last."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []


_recordings = _Recordings()


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured from the current stream; False without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep(*tensors: Tensor) -> None:
    """Keep tensors of which no graph knows that it reads them whenever it runs: what is copied from the host, tables
    that a later step replaces. Does nothing unless a graph is being captured."""
    if is_capturing():
        found = _recordings.kept[-1] if _recordings.kept else _kept
        found += tensors


@contextlib.contextmanager
def keeping() -> Iterator[list[Tensor]]:
    """Collect meanwhile what is to be kept: as long as the graph is."""
    found: list[Tensor] = []
    _recordings.kept.append(found)
    try:
        yield found
    finally:
        _recordings.kept.pop()


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
