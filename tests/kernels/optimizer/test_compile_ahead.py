"""Kernels are compiled in threads, and waited for before they are launched."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8compile.kernels.optimizer import compile_ahead
from fp8compile.kernels.optimizer.known_launch import KnownLaunch

CUDA = SimpleNamespace(device=torch.device("cuda", 0))  # stands for a tensor


class Kernel:
    """Stands for a Triton function that takes a while to compile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.compiled, self.launched, self.threads = error, list[Any](), list[Any](), list[str]()

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> Any:
        time.sleep(0.05)
        self.threads.append(threading.current_thread().name)
        if self.error:
            raise self.error
        self.compiled.append((arguments, options))
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.launched.append((len(self.compiled), arguments, options))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    yield
    compile_ahead.wait_for_all()
    assert not compile_ahead._begun


def test_a_launch_waits_for_what_was_begun() -> None:
    kernel = Kernel()
    launch: Any = KnownLaunch(kernel, (256,), {"num_warps": 4})
    launch.compile_ahead(CUDA, 7)
    assert not kernel.compiled
    launch(3, CUDA, 7)
    assert kernel.compiled == [((CUDA, 7, 256), {"num_warps": 4})]
    assert kernel.launched == [(1, (CUDA, 7, 256), {"num_warps": 4})]
    assert kernel.threads == ["fp8compile-kernel"]


def test_all_are_waited_for() -> None:
    kernels = [Kernel() for _ in range(3)]
    for kernel in kernels:
        compile_ahead.begin(kernel, (CUDA,), {})
    compile_ahead.wait_for_all()
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1, 1]


def test_several_threads_wait_for_the_same_kernel() -> None:
    """Each until it is compiled: who comes second finds it no less unfinished."""
    kernel = Kernel()
    compile_ahead.begin(kernel, (CUDA,), {})
    compiled: list[int] = []

    def look() -> None:
        compile_ahead.wait_for_all()
        compiled.append(len(kernel.compiled))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [1, 1, 1]


def test_what_is_begun_while_another_thread_waits_is_not_forgotten() -> None:
    kernel = Kernel()
    compile_ahead.begin(kernel, (CUDA,), {})
    waiting = threading.Thread(target=compile_ahead.wait, args=(kernel,))
    waiting.start()
    compile_ahead.begin(kernel, (CUDA, 7), {})
    waiting.join()
    compile_ahead.wait_for_all()
    assert [arguments for arguments, _ in kernel.compiled] == [(CUDA,), (CUDA, 7)]


def test_a_system_without_more_threads_compiles_at_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    kernel = Kernel()
    launch: Any = KnownLaunch(kernel, (256,), {})
    launch.compile_ahead(CUDA, 7)
    compile_ahead.wait_for_all()
    launch(3, CUDA, 7)
    assert kernel.launched == [(0, (CUDA, 7, 256), {})]


def test_an_error_is_left_to_the_launch() -> None:
    kernel = Kernel(RuntimeError("no"))
    compile_ahead.begin(kernel, (CUDA,), {})
    compile_ahead.wait(kernel)
    assert kernel.threads == ["fp8compile-kernel"]


@pytest.mark.parametrize("why", ["no GPU", "a capture", "interpreted"])
def test_nothing_is_begun(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = object() if why == "interpreted" else Kernel()
    monkeypatch.setattr(compile_ahead, "is_capturing", lambda: why == "a capture")
    compile_ahead.begin(kernel, (torch.zeros(1) if why == "no GPU" else CUDA,), {})
    assert not compile_ahead._begun
