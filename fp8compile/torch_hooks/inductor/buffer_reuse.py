"""Let Inductor use a freed buffer again only where no operator beside it needs memory that Inductor does not know.

Inductor keeps a freed buffer for a later one of its size, if its estimate of the peak does not grow by it. The estimate
knows buffers alone: attention's workspace is none, and over two Llama blocks 1.1 GiB were held through attention's
backward, which nobody else could have. A buffer that is not used again goes back to torch's allocator and comes from
there, which takes the host some 4 µs more: a step of a small model waits for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch._inductor import ir
from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine
from torch._inductor.virtualized import V

SMALL = 1 << 20  # bytes; torch's allocator serves them from a pool of their own, of 2 MiB pieces

_is_cautious: ContextVar[bool] = ContextVar("_is_cautious", default=False)


@contextlib.contextmanager
def reusing_cautiously() -> Iterator[None]:
    """Compile a graph whose buffers are used again only where that holds no memory through an unknown operator."""
    token = _is_cautious.set(True)
    try:
        yield
    finally:
        _is_cautious.reset(token)


def hold_nothing_through_unknown_operators() -> None:
    """Patch Inductor's decision whether a freed buffer is used again."""
    decided = AllocateLine.should_reuse_buffer

    def should_reuse_buffer(self: AllocateLine, free_line: FreeIfNotReusedLine, size: int) -> bool:
        if not _is_cautious.get():
            return decided(self, free_line, size)
        between = range(free_line.scheduler_node_index + 1, self.scheduler_node_index)
        return size <= SMALL or (decided(self, free_line, size) and not any(map(_is_unknown, between)))

    AllocateLine.should_reuse_buffer = should_reuse_buffer  # type: ignore[method-assign]


def _is_unknown(index: int) -> bool:
    """Return True if a step of the graph calls an operator that Inductor has no kernel for."""
    return any(isinstance(node.node, ir.FallbackKernel) for node in V.graph.scheduler.nodes[index].get_nodes())
