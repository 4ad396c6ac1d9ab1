"""Runs of what was compiled: they are counted, and may be listened to.

with listening(lambda part: context): …     part: "forward", a graph of a model; "optimizer", the call of a step
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks.calls.late_host import Looks

Compiled = Callable[..., Any]
Listener = Callable[[str], contextlib.AbstractContextManager[Any]]
FORWARD, OPTIMIZER = "forward", "optimizer"


@dataclass
class Runs:
    """Counts of the graphs of this process: those asked for, those that ran, and of these those with matmuls."""

    asked: int = 0
    graphs: int = 0
    matmuls: int = 0

    def clear(self) -> None:
        """Begin to count anew."""
        self.asked = self.graphs = self.matmuls = 0


runs = Runs()
_listeners: list[Listener] = []


def counted(compiled: Compiled, made: Sequence[Plan], host_launches: bool = True) -> Compiled:
    """Return `compiled`, counting its runs. made: the plans of its graph; host_launches: False for CUDA graphs.

    The first steady runs of a training graph show whether the GPU waits for the host (`late_host.py`).
    """
    has_matmuls = any(plan.matmuls for plan in made)
    looks = Looks() if has_matmuls and host_launches and made[0].graph == "training" else None

    def run(*args: Any) -> Any:
        nonlocal looks
        runs.graphs += 1
        runs.matmuls += has_matmuls
        with around(FORWARD):
            results = compiled(*args)
        if looks is not None and not looks.look(args):
            looks = None
        return results

    run.__dict__.update(vars(compiled) if isinstance(compiled, FunctionType) else {})
    return run


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener's context around each run meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def around(part: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a run: that of the last listener, or none."""
    return _listeners[-1](part) if _listeners else NOTHING


NOTHING = contextlib.nullcontext()
