"""What is never compiled: what runs between two graphs of a step, where Dynamo looks into every function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def never_compiled(function: F) -> F:
    """Return `function` hidden from Dynamo, with all that it calls; `torch.compiler.disable` loses its type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]
