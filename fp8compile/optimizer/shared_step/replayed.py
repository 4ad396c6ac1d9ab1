"""Launches that are the same in every step: after some steps one CUDA graph replays them all.

    steps 1 to 3   the function launches kernel by kernel; what it launches is compiled
    step 4         the graph is captured, and runs
    later          it runs: the host makes one call in place of five to ten launches

The functions of this room launch kernels that read and write the same memory in every step, so nothing has to be copied
for a graph. Graphs replayed on one stream share the memory of what is computed between their kernels. A step on another
stream than the last one begins anew. A step that another graph captures is launched kernel by kernel.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing, is_to_be_captured, keeping

LAUNCHED = 3  # steps before a graph is captured

_pools: weakref.WeakValueDictionary[tuple[torch.device, int], Pool] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Pool:
    """Memory of the graphs that are replayed on one stream.

    stream: where they are captured; first: the graph that keeps the memory, as torch forgets it with the last one.
    """

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    handle: Any = field(default_factory=torch.cuda.graph_pool_handle)
    first: torch.cuda.CUDAGraph | None = None


@dataclass
class Replayed:
    """Calls functions that launch kernels on `device`, and do nothing else that a step needs."""

    device: torch.device
    graph: torch.cuda.CUDAGraph | None = None
    refusal: str = ""  # why no graph could be captured
    times: int = 0  # that it was launched as it is now
    known: tuple[object, int] | None = None
    kept: list[Tensor] = field(default_factory=list)  # what the graph reads
    pool: Pool | None = None

    def __call__(self, launch: Callable[[], None], memory: object) -> None:
        """Launch, or replay. memory: equal for calls that read and write the same memory."""
        if self.refusal or is_to_be_captured() or is_capturing():
            launch()
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if self.known != (memory, stream):
            self.known, self.graph, self.times = (memory, stream), None, 0
        if self.graph is None and self.times >= LAUNCHED:
            self._capture(launch, stream)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.times += 1
            launch()

    def _capture(self, launch: Callable[[], None], stream: int) -> None:
        """Capture the launches: none of them runs. On an error they stay launches."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), _uncollected():
                self.pool = _pools.get((self.device, stream)) or _pools.setdefault((self.device, stream), Pool())
                with torch.cuda.stream(self.pool.stream), keeping() as self.kept:
                    graph.capture_begin(self.pool.handle, capture_error_mode="thread_local")
                    try:
                        launch()
                    finally:
                        graph.capture_end()
        except RuntimeError as error:
            self.refusal = str(error)
            return
        self.graph = graph
        self.pool.first = self.pool.first or graph


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: what is freed might be another graph, which is forbidden during a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
