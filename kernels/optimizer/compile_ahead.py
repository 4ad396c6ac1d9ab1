"""Compile ahead: threads compile an optimizer's kernels while its next rule is traced, not one after the other later.

    begin(kernel, arguments, options)     in a thread; arguments like those of the launches to come
    wait(kernel)                          before it is launched, or it would be compiled twice
    wait_for_all()                        nothing is loaded onto the GPU any more: a CUDA graph may be captured

Triton gives up Python's lock while it optimizes and assembles, which is most of the time that it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from fp8compile.cuda_capture import is_capturing

_lock = threading.Lock()  # of what is begun
_begun: dict[int, list[threading.Thread]] = {}  # by the identity of the kernel, which the thread keeps alive


def begin(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, int | bool]) -> None:
    """Compile `kernel`, and make its launcher; its first argument is a tensor on the device of the launches."""
    device = arguments[0].device
    if device.type != "cuda" or is_capturing() or not hasattr(kernel, "warmup"):  # the interpreter compiles nothing
        return

    def compile_it() -> None:
        try:
            with torch.cuda.device(device):
                _ = kernel.warmup(*arguments, grid=(1,), **options).run  # made when it is first asked for
        except Exception:  # what it is, the launch says
            return

    thread = threading.Thread(target=compile_it, name="fp8compile-kernel")
    with _lock:
        try:
            thread.start()
        except RuntimeError:  # the system starts no more threads: the launch compiles
            return
        _begun.setdefault(id(kernel), []).append(thread)


def wait(kernel: Any) -> None:
    """Wait until what was begun of `kernel` is there."""
    _wait(id(kernel))


def wait_for_all() -> None:
    """Wait until all that was begun is there."""
    with _lock:
        keys = tuple(_begun)
    for key in keys:
        _wait(key)


def _wait(key: int) -> None:
    """Wait, then forget: another thread that steps an optimizer waits for the same ones."""
    with _lock:
        threads = tuple(_begun.get(key, ()))
    for thread in threads:
        thread.join()
    with _lock:
        left = [thread for thread in _begun.pop(key, ()) if thread not in threads]
        if left:
            _begun[key] = left
