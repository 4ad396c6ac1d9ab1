"""The times of a training step: how long the host takes to launch each part of it, and how long the GPU works for it.

    with StepTimes().measuring() as times:
        train()
    print(times.text())

Parts: forward (graphs compiled for this backend), backward (`loss.backward()`), and optimizer (compiled steps). What
lies between them is the rest of the step, which ends where the forward pass after the optimizer begins. The first
steps are left out; the host is timed in later ones, and then each part, and all of a step, is profiled in a step of its
own, as a profiler makes the host slower.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fp8compile.errors import Fp8Error
from fp8compile.torch_hooks.calls.graph_runs import FORWARD, OPTIMIZER, listening

BACKWARD = "backward"
PARTS = (FORWARD, BACKWARD, OPTIMIZER)
WHOLE = "all of it"
PROFILED = (*PARTS, WHOLE)
SKIPPED, TIMED = 6, 10  # steps
NEEDED = SKIPPED + TIMED + len(PROFILED)
WAITS = 4 / 3  # a step this much longer than its kernels waits for the host


@dataclass
class StepTimes:
    """Times of steps, in milliseconds. host: of each part, a number a step; gpu: kernels of each part, and of all."""

    steps: list[float] = field(default_factory=list)
    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gpu: dict[str, float] = field(default_factory=dict)
    count: int = 0
    _now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inside: bool = False
    _last: str = ""
    _began: float = 0.0
    _has_optimizer: bool = False
    _whole: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[StepTimes]:
        """Measure the steps that run meanwhile."""
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._part(BACKWARD):
                return backward(*args, **kwargs)

        torch.autograd.backward = timed
        try:
            with self._whole, listening(self._part):
                yield self
        finally:
            torch.autograd.backward = backward

    @property
    def is_complete(self) -> bool:
        """Return True once every part has been measured."""
        return self.count >= NEEDED

    @contextlib.contextmanager
    def _part(self, part: str) -> Iterator[None]:
        """Time one part of a step, or profile it; what runs inside of another part belongs to that one."""
        if self._inside or self.is_complete or (part == FORWARD and not torch.is_grad_enabled()):
            yield
            return
        if part == FORWARD and self._last == (OPTIMIZER if self._has_optimizer else BACKWARD):
            self._end_step()
        self._inside, self._last = True, part
        try:
            if part == self._profiled():
                with self._profiling(part):
                    yield
            else:
                began = time.perf_counter()
                yield
                self._now[part] += (time.perf_counter() - began) * 1e3
        finally:
            self._inside = False
        self._has_optimizer |= part == OPTIMIZER

    def _profiled(self) -> str:
        """Return what is profiled in this step; "" while the host is timed."""
        index = self.count - SKIPPED - TIMED
        return PROFILED[index] if 0 <= index < len(PROFILED) and torch.cuda.is_available() else ""

    @contextlib.contextmanager
    def _profiling(self, part: str) -> Iterator[None]:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            yield
            torch.cuda.synchronize()
        on_gpu = [e for e in recorded.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
        self.gpu[part] = self.gpu.get(part, 0.0) + sum(e.device_time_total for e in on_gpu) / 1e3

    def _end_step(self) -> None:
        """Keep the times of a step, if it is one of those that are timed."""
        now = time.perf_counter()
        if SKIPPED <= self.count < SKIPPED + TIMED:
            self.steps.append((now - self._began) * 1e3)
            for part in PARTS:
                self.host[part].append(self._now[part])
        self._whole.close()
        self._now.clear()
        self._began = now
        self.count += 1
        if self._profiled() == WHOLE:
            self._whole.enter_context(self._profiling(WHOLE))

    def text(self) -> str:
        """Return a line a part, and one that says who waits for whom; raises `Fp8Error` if there were too few steps."""
        if not self.is_complete:
            raise Fp8Error(
                f"{self.count} steps were seen, and {NEEDED} are needed: each of a model compiled with backend='fp8', "
                "its backward pass, and best a compiled step of an optimizer. Replays of a CUDA graph are not seen: "
                "time the step as it is, before `capture_step`"
            )
        step = statistics.median(self.steps)
        host = {part: statistics.median(self.host[part]) for part in PARTS}
        lines = [f"{'ms a step':<12}{'host':>8}{'GPU':>8}"]
        lines += [
            f"{part:<12}{host[part]:>8.2f}{f'{self.gpu[part]:.2f}' if part in self.gpu else '–':>8}" for part in PARTS
        ]
        rest = f"{max(0.0, self.gpu[WHOLE] - sum(self.gpu.get(part, 0.0) for part in PARTS)):.2f}" if self.gpu else "–"
        lines.append(f"{'the rest':<12}{max(0.0, step - sum(host.values())):>8.2f}{rest:>8}")
        return "\n".join([*lines, "", f"A step takes {step:.2f} ms. {self._verdict(step)}"]) + "\n"

    def _verdict(self, step: float) -> str:
        if not self.gpu:
            return "There is no GPU."
        works = f"The GPU works for {self.gpu[WHOLE]:.2f} ms of them: it"
        if step > WAITS * self.gpu[WHOLE]:
            return (
                f"{works} waits. If for these launches, options={{'mode': 'reduce-overhead'}} or "
                "fp8compile.capture_step spare them; if for the rest, look at data and logging."
            )
        return f"{works} has enough to do."
