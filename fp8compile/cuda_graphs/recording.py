"""One recorded call of a step: its CUDA graph, the tensors it reads its inputs from, and its results."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8compile.cuda_capture import keeping, to_be_captured
from fp8compile.errors import CaptureError

Step = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Recorder:
    """Runs steps on a stream of its own, and records them: all graphs share one pool of memory.

    Both run on copies of the inputs, on the GPU, so that what is compiled for the first ones is there for the others.
    stream: where steps run that are not replayed, as torch wants of what is to be captured; failed: graphs whose
    capture failed, to which torch's allocator still refers.
    """

    device: torch.device
    stream: torch.cuda.Stream
    pool: Any = None
    failed: list[torch.cuda.CUDAGraph] = field(default_factory=list)

    @classmethod
    def on(cls, device: torch.device) -> Recorder:
        """Return a recorder for a GPU."""
        with torch.cuda.device(device):
            return cls(device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())

    def begin_anew(self) -> None:
        """Take another pool: torch gives one up together with the last of its graphs."""
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step as it is, on the stream that is captured later; returns copies of its results."""
        with self._beside(), to_be_captured():
            held_args, held_kwargs = self._held(args, kwargs)
            return copied(step(*held_args, **held_kwargs))

    def record(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Return a recording of the step, which has not run; raises `CaptureError` with the reason."""
        held = self._held(args, kwargs)
        inputs = tensors_of(held)
        versions, random_numbers = [x._version for x in inputs], host_random_numbers()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        first: BaseException | None = None  # torch raises another one when it ends the capture
        try:
            with (
                torch.cuda.device(self.device),
                to_be_captured(),
                keeping() as kept,
                # Only what this thread does is checked: loaders of data allocate pinned memory meanwhile.
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                try:
                    results = step(*held[0], **held[1])
                except BaseException as error:
                    first = error
                    raise
        except BaseException as error:
            self._recover(graph, current)
            if not isinstance(first or error, Exception):  # Ctrl-C
                raise
            raise CaptureError(_reason(first or error)) from first or error
        if versions != [x._version for x in inputs]:
            raise CaptureError("the step writes into a tensor that it is given: a replay writes into a copy of it")
        if random_numbers != host_random_numbers():
            raise CaptureError("the step draws random numbers on the host, and replays would take the same ones again")
        results = pytree.tree_map_only(Tensor, Tensor.detach, results)  # and not what backward has read
        return Recording(graph, inputs, results, kept)

    def _held(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return copies of the inputs on the GPU."""
        return pytree.tree_map_only(Tensor, lambda x: x.to(self.device).clone(), (args, dict(kwargs)))

    def _recover(self, graph: torch.cuda.CUDAGraph, current: torch.cuda.Stream) -> None:
        """Put back what torch leaves behind where a capture fails: the stream, the pool, the random numbers."""
        torch.cuda.set_stream(current)
        self.failed.append(graph)
        self.begin_anew()
        with contextlib.suppress(RuntimeError):  # the end of a capture tells the generator that it is over
            another = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.device), torch.cuda.graph(another, stream=self.stream):
                torch.zeros((), device=self.device, dtype=torch.float32)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the stream of the captures, after what is queued now and before what is queued later."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                current.wait_stream(self.stream)


@dataclass
class Recording:
    """A captured step. inputs: the tensors it reads; results: what it returned, overwritten by every replay; kept: what
    else it reads.

    before: the address that each parameter's gradient has to have, None for no gradient, ANY where the step begins
    with `zero_grad`; after: the gradients that the step leaves; written: the parameters that it writes.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any
    kept: list[Tensor] = field(default_factory=list)
    before: list[int | None] = field(default_factory=list)
    after: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on other tensors of the same shapes; return copies of its results."""
        with torch.no_grad():
            for mine, x in zip(self.inputs, tensors_of((args, kwargs)), strict=True):
                mine.copy_(x, non_blocking=x.is_cuda)  # the caller may write the next batch into a pinned one
        self.graph.replay()
        return copied(self.results)


ANY = -1


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def copied(results: Any) -> Any:
    """Return results with copies of their tensors, without what they were computed from."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), results)


def host_random_numbers() -> list[Any]:
    """Return the states of the generators on the host, as what can be compared."""
    found: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *others = numpy.random.get_state()
        found += [name, keys.tobytes(), *others]
    return found


def _reason(error: BaseException) -> str:
    """Return the first line of an error, behind its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
