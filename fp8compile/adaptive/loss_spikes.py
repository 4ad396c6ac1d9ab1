"""Losses of steps, and which of them is a spike: far above those before it.

A loss is copied to the host and read `DELAY` losses later: so many steps, and no more, the host may run ahead of the
device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DELAY = 2  # losses for which one is on its way to the host
WINDOW, LEAST = 32, 16  # losses that one is compared with, and how many there must be
FLOOR = 0.01  # of their mean: what is taken for their deviation where it is less


@dataclass
class LossSpikes:
    """The losses before a step, by which the next ones are judged.

    deviations: a spike is so many standard deviations above the mean of the last losses, or is not finite.
    """

    deviations: float
    _known: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _coming: deque[tuple[Tensor, torch.cuda.Event | None]] = field(default_factory=deque)

    def add(self, loss: Tensor) -> str:
        """Take the loss of a step, [] on any device; return what is wrong with one of some steps ago, "" if nothing."""
        self._coming.append(_on_its_way(loss.detach()))
        if len(self._coming) <= DELAY:
            return ""
        value, event = self._coming.popleft()
        if event is not None:
            event.synchronize()
        return self.judge(value.item())

    def judge(self, loss: float) -> str:
        """Return why a loss is a spike, "" if it is none. After a spike all begins anew: it may be another level."""
        if len(self._known) >= LEAST or not math.isfinite(loss):
            mean = statistics.fmean(self._known) if self._known else math.nan
            deviation = max(statistics.pstdev(self._known), FLOOR * abs(mean)) if self._known else math.nan
            if not math.isfinite(loss) or loss > mean + self.deviations * deviation:
                before = f"{mean:.4g} ± {deviation:.2g} in the {len(self._known)} steps before"
                self._known.clear()
                return f"a loss of {loss:.4g}, {before}"
        self._known.append(loss)
        return ""


def loss_among(outputs: Any) -> Tensor | None:
    """Return the loss among the outputs of a training graph: the first plain single number that needs a gradient."""
    found: Iterable[Any] = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    is_loss = (x for x in found if type(x) is Tensor and x.dim() == 0 and x.requires_grad)
    return next(is_loss, None)


def _on_its_way(loss: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the loss as an FP32 number on the host, and the event after which it is there."""
    if not loss.is_cuda:
        return loss.float().cpu().clone(), None
    with torch.cuda.device_of(loss):
        host = torch.empty((), dtype=torch.float32, pin_memory=True, device="cpu")
        host.copy_(loss.float(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event
