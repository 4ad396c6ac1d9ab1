"""The user's line in which a compilation happens: where warnings point, and what is said of code that has no line.

A compilation runs many frames below it, of torch and of this package, so no fixed `stacklevel` finds it.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

from fp8compile.errors import Fp8Warning
from fp8compile.source_digest import HERE

OURS = (f"{Path(torch.__file__).parent}/", f"{HERE}/", f"{HERE.resolve()}/")
BETWEEN = (contextlib.__file__, functools.__file__)  # of decorators and contexts
MADE = ("<eval_with_key", "<frozen")  # code without a file


def user_frame() -> FrameType | None:
    """Return the nearest frame that is neither torch's nor ours; None on a thread of autograd's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in BETWEEN and not file.startswith((*OURS, *MADE)):
            return frame
        frame = frame.f_back
    return None


def calling_line() -> str:
    """Return the user's line that is running, as "train.py:12  loss = step(x)"; "" if there is none."""
    frame = user_frame()
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    code = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
    return f"{Path(file).name}:{frame.f_lineno}  {code}".rstrip()


def warn_user(message: str) -> None:
    """Warn with an `Fp8Warning` at the user's line; if there is none, at the caller's."""
    frame = user_frame() or sys._getframe(1)
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, Fp8Warning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )
