"""Whether Inductor compiles a graph of this backend: what is changed of it asks that first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)


@contextlib.contextmanager
def compiling_ours() -> Iterator[None]:
    """Compile a graph of this backend with Inductor."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def is_ours() -> bool:
    """Return True while a graph of this backend is compiled."""
    return _is_ours.get()
