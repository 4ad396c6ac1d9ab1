"""What the hooks tell whoever looks on while a graph is compiled: a dump, `fp8compile/insight/dump/dumps.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import fx

from fp8compile.plan.plan import Plan


class CompilationObserver(Protocol):
    """Sees graphs, plans, code and failures of one compilation. half: "joint", "optimizer", "forward", …"""

    def observer(self, half: str, graph: fx.Graph) -> Callable[[str, str], None]:
        """Return what passes call after each step on `graph`."""
        ...

    def stage(self, half: str, name: str, graph: fx.Graph) -> None:
        """See `graph` as it is now."""
        ...

    def failed(self, half: str, error: Exception, graph: fx.Graph, step: str) -> None:
        """See what failed in `step`, and the graph as that left it."""
        ...

    def code(self, half: str, source: str) -> None:
        """See what Inductor made of a half."""
        ...

    def plans(self, plans: Sequence[Plan]) -> None:
        """See the decisions, as far as they have been made."""
        ...
