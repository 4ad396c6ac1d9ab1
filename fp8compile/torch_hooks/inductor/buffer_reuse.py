"""Let Inductor use a freed buffer again only where that holds no memory: a small one, or one for the next kernel.

Inductor keeps a freed buffer for a later one of its size, however far away, if by its estimate the peak of the graph
does not grow. The estimate knows no workspaces: over two Llama blocks 1.1 GiB were held through attention. What is not
used again goes back to torch's allocator and comes from there, for everybody; that takes the host longer, for which a
step of a small model waits. Many buffers of a graph with FP8 are small: amaxes, scales, partial sums.
"""

from __future__ import annotations

from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine
from torch._inductor.virtualized import V  # the graph that is compiled

from fp8compile import host_copies
from fp8compile.torch_hooks.inductor.our_graph import is_ours_with_fp8

SMALL = 1 << 20  # bytes; torch's allocator serves them from a pool of their own, of 2 MiB pieces


def hold_no_memory() -> None:
    """Patch Inductor's decision whether a freed buffer is used again."""
    decided = AllocateLine.should_reuse_buffer

    def should_reuse_buffer(self: AllocateLine, free_line: FreeIfNotReusedLine, size: int) -> bool:
        if (running := _read_by_copies()) and free_line.node.get_name() in running:
            return False
        if not is_ours_with_fp8():
            return decided(self, free_line, size)
        # a size of 0 is one that only the data knows
        return 0 < size <= SMALL or free_line.scheduler_node_index + 1 == self.scheduler_node_index

    AllocateLine.should_reuse_buffer = should_reuse_buffer  # type: ignore[method-assign]


def _read_by_copies() -> set[str]:
    """Return the names of the buffers of the graph that is compiled of which a copy to the host may still run when the
    next kernel is launched."""
    copies = [op for op in V.graph.operations if getattr(op, "op_overload", None) is host_copies.to_host]
    return {x.get_name() for copy in copies for x in copy.inputs}  # type: ignore[attr-defined]
