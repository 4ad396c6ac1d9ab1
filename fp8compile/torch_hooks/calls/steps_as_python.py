"""Steps as Python: for one call of a compiled function, on this thread, Dynamo does not look at what is called.

    our context around the call: `leave_to_python()`  →  torch asks which callback Dynamo gets: none, this once

`torch.compiler.set_stance("force_eager")` says the same to all threads, and two threads that restore it leave it
behind. What is called meanwhile and compiled itself (a closure, a hook of the step) has a wrapper of its own, which
asks again.

Private API of torch: its function that says what Dynamo's callback is for a call.
"""

from __future__ import annotations

import threading
from typing import Any

from torch._dynamo import eval_frame  # which callback a call gets


class _NextCall(threading.local):
    is_python: bool = False


_next = _NextCall()


def ask_us() -> None:
    """Have torch ask this module too which callback a call gets."""
    original = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        if _next.is_python and callback is not None and callback is not False:
            _next.is_python = False
            return None
        return original(callback)

    vars(callback_from_stance)["asks_us"] = True
    eval_frame._callback_from_stance = callback_from_stance


def is_possible() -> bool:
    """Return False with a torch that lacks the function, or where another tool has put back its own."""
    return hasattr(getattr(eval_frame, "_callback_from_stance", None), "asks_us")


def leave_to_python() -> None:
    """Have torch run the compiled function that this thread is about to call as plain Python, this once."""
    _next.is_python = True


def forget() -> None:
    """Withdraw `leave_to_python`, if no call has used it."""
    _next.is_python = False
