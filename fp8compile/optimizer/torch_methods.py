"""Methods of an optimizer's class: torch's own, beneath what we have put over them.

`prepare.py` replaces `_init_group` of a class by a function that calls the one before it, and Dynamo wraps methods of
torch's optimizers in functions of its own when something is first compiled: in either order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

REPLACED = "_fp8compile_replaced"  # of a method that we have put in place of another: that other one


def replaced(method: Any) -> Callable[..., Any] | None:
    """Return the method that `method` was put in place of; None if it is not ours."""
    return getattr(method, REPLACED, None)


def original_method(opt: Optimizer, name: str) -> Callable[..., Any] | None:
    """Return the function that a method of the class of `opt` is without our part; None if there is no such method."""
    method = getattr(type(opt), name, None)
    return replaced(method) or method


def is_torchs(opt: Optimizer, name: str) -> bool:
    """Return True if a method of the class of `opt` is one of torch.optim."""
    function = inspect.unwrap(original_method(opt, name) or len)
    return str(getattr(function, "__module__", "")).startswith("torch.optim.")
