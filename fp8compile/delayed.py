"""Delayed scaling: scales from the amax history of a tensor, kept between steps and saved with checkpoints.

    scale_t = max(amax_{t-1}, …, amax_{t-history}) · 2^margin / format max

The guard: where this step's amax would saturate under that scale, is not finite, or no history exists yet, the scale
of this step is the current one. It costs an amax, and nothing ever saturates.

A non-finite amax does not enter the history. Nor does what else was recorded in a forward and backward pass in which
one was seen: the next pass finds the histories as that pass had found them. (A GradScaler skips
such a step; what its too large scale made of finite gradients would stay for `history` steps.)

Histories live here, by key (`model<i>/<module path>/<role>/<operand>`), one FP32 tensor [history] on the device of the
tensor they describe. `state_dict` and `load_state_dict` carry them through a checkpoint.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8compile import process_state
from fp8compile.errors import Fp8Error
from fp8compile.formats import FORMATS
from fp8compile.kernels.reference import markers


@dataclass
class _Pass:
    """One forward and backward pass of a model: a key that comes again begins the next.

    overflowed, previous_overflowed: bool []; on the device, so that nobody waits, and a CUDA graph may replay it.
    """

    overflowed: Tensor
    previous_overflowed: Tensor
    seen: set[str] = field(default_factory=set)
    previous_seen: set[str] = field(default_factory=set)

    def enter(self, key: str) -> None:
        """Begin the next pass if `key` is to be recorded for the second time."""
        if key in self.seen:
            self.previous_overflowed.copy_(self.overflowed)
            self.overflowed.zero_()
            self.previous_seen, self.seen = self.seen, set()
        self.seen.add(key)


_histories: dict[str, Tensor] = {}
_before: dict[str, Tensor] = {}  # each history as it was before its last entry
_passes: dict[tuple[str, torch.device], _Pass] = {}  # by model
_models: dict[int, weakref.ref[torch.nn.Parameter]] = {}


def tensors() -> list[Tensor]:
    """Return the tensors that steps with delayed scaling read and write."""
    of_passes = [x for each in _passes.values() for x in (each.overflowed, each.previous_overflowed)]
    return [*_histories.values(), *_before.values(), *of_passes]


def scale(amax: Tensor, key: str, format: str, history: int, margin: int, power_of_two: bool = False) -> Tensor:
    """Return the scale of this step (FP32 []), from the history under `key`; record `amax` (FP32 [])."""
    kept, before = _history(key, history, amax.device)
    now = _pass_of(key, amax.device)
    now.enter(key)
    past = torch.where(now.previous_overflowed, before, kept) if key in now.previous_seen else kept.clone()
    expected = past.amax() * 2.0**margin
    finite = torch.isfinite(amax)
    usable = (amax <= expected) & finite  # FP32 division rounds amax/expected ≤ 1 to ≤ 1: no saturation
    chosen = torch.where(usable, expected, amax)
    before.copy_(past)
    kept.copy_(torch.where(finite, torch.cat([amax.reshape(1), past[:-1]]), past))
    now.overflowed.logical_or_(~finite)
    return markers.scale(chosen, FORMATS[format].name, power_of_two)


def _history(key: str, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the history under `key`, and as it was before its last entry; of another length, its newest entries."""
    kept = _histories.get(key)
    if kept is None or kept.shape[0] != length or kept.device != device:
        for known in (_histories, _before):
            fresh = torch.zeros(length, dtype=torch.float32, device=device)
            if (old := known.get(key)) is not None:
                n = min(length, old.shape[0])
                fresh[:n] = old[:n].to(device)
            known[key] = fresh
    return _histories[key], _before[key]


def _pass_of(key: str, device: torch.device) -> _Pass:
    owner = key.partition("/")[0], device
    if owner not in _passes:
        none = torch.zeros((), dtype=torch.bool, device=device)
        _passes[owner] = _Pass(none, none.clone())
    return _passes[owner]


def namespace(parameters: list[torch.nn.Parameter]) -> str:
    """Return a name for the model these parameters belong to: model0, model1, … in order of first compilation."""
    for index, known in _models.items():
        owner = known()
        if owner is not None and any(owner is p for p in parameters):
            return f"model{index}"
    index = len(_models)
    if parameters:
        _models[index] = weakref.ref(parameters[0])
    return f"model{index}"


def state_dict() -> dict[str, Tensor]:
    """Return copies of all amax histories: key → FP32 [history]. Save them beside the model's own state.

    After a pass that overflowed they are those of before it.
    """
    return {key: _settled(key) for key in _histories}


def _settled(key: str) -> Tensor:
    kept = _histories[key]
    now = _passes.get((key.partition("/")[0], kept.device))
    if now is None or key not in now.seen | now.previous_seen:
        return kept.clone()
    overflowed = now.overflowed if key in now.seen else now.previous_overflowed
    return torch.where(overflowed, _before[key], kept)


def load_state_dict(state: Mapping[str, Tensor]) -> None:
    """Put back what `state_dict` gave; call it before the next step. Raises `Fp8Error` for anything else."""
    for key, kept in state.items():
        if not isinstance(kept, Tensor) or kept.dim() != 1 or not kept.is_floating_point():
            raise Fp8Error(f"delayed scaling: {key!r} is not an amax history (a 1-D float tensor)")
    for key, kept in state.items():
        for known in (_histories, _before):
            mine = known.get(key)
            if mine is not None and mine.shape == kept.shape:
                mine.copy_(kept)
            else:
                known[key] = kept.detach().clone().float()


def reset() -> None:
    """Forget every history and every model."""
    process_state.reset_module(__name__)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Put back, at the end of this context, all histories as they were, and which models they belong to."""
    before, models = state_dict(), dict(_models)
    try:
        yield
    finally:
        reset()
        _models.update(models)
        load_state_dict(before)
