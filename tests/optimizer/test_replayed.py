"""Launches become a CUDA graph, and launches again, where they must: on a stand-in for CUDA that runs what is launched
outside of a capture, and keeps what is launched within one for replays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8compile import cuda_capture
from fp8compile.optimizer.shared_step import replayed
from fp8compile.optimizer.shared_step.replayed import LAUNCHED, Replayed

DEVICE = torch.device("cuda", 0)


class Cuda:
    """A device. ran: what has run, in order, by whom."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.stream = 7
        self.captured: list[str] | None = None
        self.pools: list[Any] = []

    def launch(self, name: str = "kernel") -> None:
        if self.captured is None:
            self.ran.append(f"{name} launched")
        else:
            assert not gc.isenabled()
            self.captured.append(name)

    def graph(self) -> Graph:
        return Graph(self)

    @contextlib.contextmanager
    def within(self, _: Any) -> Iterator[None]:
        yield


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"  # what other threads do ends no capture
        self.cuda.pools.append(pool)
        self.cuda.captured = []

    def capture_end(self) -> None:
        assert self.cuda.captured is not None
        self.kernels, self.cuda.captured = self.cuda.captured, None

    def replay(self) -> None:
        self.cuda.ran += [f"{name} replayed" for name in self.kernels]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found, handles = Cuda(), iter(range(100))

    class Stream:
        @property
        def cuda_stream(self) -> int:
            return found.stream

    for name, value in {
        "CUDAGraph": found.graph,
        "current_stream": lambda _: Stream(),
        "device": found.within,
        "stream": found.within,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(replayed, "Pool", lambda made=replayed.Pool: made(Stream(), next(handles)))  # type: ignore[arg-type]
    monkeypatch.setattr(replayed, "is_capturing", lambda: False)
    return found


def run(cuda: Cuda, step: Replayed, times: int, memory: object = 0, launch: Callable[[], None] | None = None) -> str:
    """L for each step that was launched, R for each that was replayed."""
    cuda.ran.clear()
    for _ in range(times):
        step(launch or cuda.launch, memory)
    assert len(cuda.ran) == times  # each once, also the one that is captured
    return "".join("L" if x.endswith("launched") else "R" for x in cuda.ran)


def test_a_graph_is_captured_when_steps_have_been_alike(cuda: Cuda) -> None:
    step = Replayed(DEVICE)
    assert run(cuda, step, LAUNCHED + 3) == "LLLRRR"
    assert gc.isenabled()


def test_other_memory_or_another_stream_begins_anew(cuda: Cuda) -> None:
    step = Replayed(DEVICE)
    assert run(cuda, step, 5, [1]) == "LLLRR"
    assert run(cuda, step, 5, [2]) == "LLLRR"
    assert run(cuda, step, 2, [1]) == "LL"
    assert run(cuda, step, 4, [2]) == "LLLR"
    cuda.stream = 8
    assert run(cuda, step, 4, [2]) == "LLLR"


def test_a_step_that_another_graph_captures_is_launched(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Replayed(DEVICE)
    run(cuda, step, 5)
    with cuda_capture.to_be_captured():
        assert run(cuda, step, 2) == "LL"
    assert run(cuda, step, 2) == "RR"
    monkeypatch.setattr(replayed, "is_capturing", lambda: True)
    assert run(cuda, step, 2) == "LL"


def test_what_cannot_be_captured_stays_launches(cuda: Cuda) -> None:
    def fails_in_a_capture() -> None:
        if cuda.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.launch()

    step = Replayed(DEVICE)
    assert run(cuda, step, 6, launch=fails_in_a_capture) == "LLLLLL"
    assert "not permitted" in step.refusal
    assert cuda.captured is None
    assert gc.isenabled()
    assert len(cuda.pools) == 1  # tried once


def test_graphs_of_a_stream_share_memory_as_long_as_one_lives(cuda: Cuda) -> None:
    first, second, elsewhere = (Replayed(DEVICE) for _ in range(3))
    for step in (first, second):
        run(cuda, step, 4)
    cuda.stream = 8
    run(cuda, elsewhere, 4)
    assert cuda.pools[0] == cuda.pools[1] != cuda.pools[2]
    kept = first.graph
    del first, step
    assert second.pool is not None
    assert second.pool.first is kept  # torch forgets memory of which no graph is left
    assert len(replayed._pools) == 2
    del second, elsewhere, kept
    gc.collect()
    assert not replayed._pools


def test_what_a_graph_reads_is_kept(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda: cuda.captured is not None)
    step, table = Replayed(DEVICE), torch.zeros(1)

    def launch() -> None:
        cuda_capture.keep(table)
        cuda.launch()

    run(cuda, step, 5, launch=launch)
    assert [x is table for x in step.kept] == [True]
