"""Whether Inductor compiles a graph of this backend, with FP8 or without: what is changed of it asks that first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_has_fp8: ContextVar[bool | None] = ContextVar("_has_fp8", default=None)  # None: the graph is not ours


@contextlib.contextmanager
def compiling_ours(has_fp8: bool = True) -> Iterator[None]:
    """Compile a graph of this backend with Inductor. has_fp8: it has markers, or 8-bit states."""
    token = _has_fp8.set(has_fp8)
    try:
        yield
    finally:
        _has_fp8.reset(token)


def is_ours() -> bool:
    """Return True while a graph of this backend is compiled."""
    return _has_fp8.get() is not None


def is_ours_with_fp8() -> bool:
    """Return True while a graph of this backend is compiled that has FP8."""
    return bool(_has_fp8.get())
