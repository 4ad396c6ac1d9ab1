"""One recorded call of a step: its CUDA graph, the tensors it reads its inputs from, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8compile.errors import CaptureError

Step = Callable[..., Any]


@dataclass
class Recorder:
    """Runs steps on a stream of its own, and records them: all graphs share one pool of memory.

    stream: where steps run that are not replayed, as torch wants of what is to be captured.
    """

    device: torch.device
    stream: torch.cuda.Stream
    pool: Any = None

    @classmethod
    def on(cls, device: torch.device) -> Recorder:
        """Return a recorder for a GPU."""
        with torch.cuda.device(device):
            return cls(device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())

    def begin_anew(self) -> None:
        """Take another pool: torch gives one up together with the last of its graphs."""
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step as it is, on the stream that is captured later."""
        with self._beside():
            return step(*args, **kwargs)

    def record(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Return a recording of the step, which has not run; raises `CaptureError` with the reason.

        The step is given tensors on the GPU, whichever device `args` are on.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [torch.clone(x.to(self.device)) if isinstance(x, Tensor) else x for x in leaves]
        held = [x for x in inputs if isinstance(x, Tensor)]
        versions = [x._version for x in held]
        held_args, held_kwargs = pytree.tree_unflatten(inputs, spec)
        graph = torch.cuda.CUDAGraph()
        first: Exception | None = None  # torch raises another one when it ends the capture
        try:
            with (
                torch.cuda.device(self.device),
                # Only what this thread does is checked: loaders of data allocate pinned memory meanwhile.
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                try:
                    results = step(*held_args, **held_kwargs)
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            raise CaptureError(_reason(first or error)) from first or error
        if versions != [x._version for x in held]:
            raise CaptureError("the step writes into a tensor that it is given: a replay writes into a copy of it")
        results = pytree.tree_map_only(Tensor, Tensor.detach, results)  # and not what backward has read
        return Recording(graph, held, results)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the stream of the captures, after what is queued now and before what is queued later."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                yield
            current.wait_stream(self.stream)


@dataclass
class Recording:
    """A captured step. inputs: the tensors it reads; results: what it returned, overwritten by every replay.

    gradients: of each parameter, after the step.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on other tensors of the same shapes; return copies of its results."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with torch.no_grad():
            for mine, x in zip(self.inputs, given, strict=True):
                mine.copy_(x, non_blocking=True)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self.results)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, behind its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
