"""How long something takes, what memory it holds, and on which machine: what benchmarks have in common."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GIB, MIB = 1 << 30, 1 << 20


def intervals(step: Callable[[], object], count: int, device: str) -> list[float]:
    """Milliseconds from the end of one step to the end of the next, queued without waiting, as training does."""
    if device != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def milliseconds(call: Callable[[], object], count: int = 15) -> float:
    """Median of calls on the GPU, each queued after the one before is done: the host's time is part of it."""
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def device_milliseconds(call: Callable[[], object], count: int = 25, cycles: int = 20_000_000) -> float:
    """Median of calls on the GPU, each queued while that is busy for `cycles`: the host's time is no part of it."""
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)  # the host queues the call meanwhile
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[count // 5 :])


def peak_gib(step: Callable[[], object], count: int, device: str) -> tuple[float, float]:
    """(GiB allocated at most during `count` steps, the part of it that a step adds to what was there before)."""
    if device != "cuda":
        for _ in range(count):
            step()
        return 0.0, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak / GIB, (peak - before) / GIB


def bytes_of(x: Any) -> int:
    """Bytes of a tensor; of a wrapper, of the tensors in it."""
    if not isinstance(x, Tensor):
        return 0
    flatten = getattr(x, "__tensor_flatten__", None)
    return x.nbytes if flatten is None else sum(bytes_of(getattr(x, name)) for name in flatten()[0])


def machine() -> dict[str, str]:
    """Return the GPU, its driver, and the versions of what measures and is measured. Starts CUDA."""
    on_gpu = torch.cuda.is_available()
    found = {"device": torch.cuda.get_device_name() if on_gpu else platform.machine(), "torch": torch.__version__}
    for package in ("triton", "torchao", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if on_gpu and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        found["driver"] = answer.stdout.strip().split("\n")[0]
    return found
