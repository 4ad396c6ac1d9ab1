"""Delayed scaling: scales from the amax history of a tensor, kept between steps and saved with checkpoints.

    scale_t = max(amax_{t-1}, …, amax_{t-history}) · 2^margin / format max

The guard: where this step's amax would saturate under that scale, is not finite, or no history exists yet, the scale
of this step is the current one. It costs an amax, and nothing ever saturates.

A non-finite amax does not enter the history. Nor does what else was recorded in a forward and backward pass in which
one was seen: the next pass finds the histories as that pass had found them. (A GradScaler skips
such a step; what its too large scale made of finite gradients would stay for `history` steps.)

Histories live here, by key (`model<i>/<module path>/<role>/<operand>`), one FP32 tensor [history] on the device of the
tensor they describe. `state_dict` and `load_state_dict` carry them through a checkpoint. Models are numbered in the
order in which they are first compiled for training, which after a restart must be the same; a model that is gone leaves
its number to the next one. What is loaded under a number that another model has is warned of.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile import process_state
from fp8compile.errors import Fp8Error, Fp8Warning
from fp8compile.formats import FORMATS
from fp8compile.kernels.reference import markers
from fp8compile.model_identity import Parameters


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
_models: dict[int, Parameters] = {}
_loaded: set[str] = set()  # keys that were loaded, and not read since


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
    if _loaded:
        _read_what_was_loaded(key, kept is None)
    if kept is None or kept.shape[0] != length or kept.device != device:
        for known in (_histories, _before):
            fresh = torch.zeros(length, dtype=torch.float32, device=device)
            if (old := known.get(key)) is not None:
                n = min(length, old.shape[0])
                fresh[:n] = old[:n].to(device)
            known[key] = fresh
    return _histories[key], _before[key]


def _read_what_was_loaded(key: str, is_new: bool) -> None:
    """Note that `key` is read; warn where it begins without a history, and one was loaded under another number."""
    _loaded.discard(key)
    others = [k for k in _loaded if k.partition("/")[2] == key.partition("/")[2]] if is_new else []
    if others:
        _loaded.clear()
        warnings.warn(
            f"fp8: delayed scaling: a history was loaded for {others[0]!r}, and this model is numbered "
            f"{key.partition('/')[0]}: it begins without. Models are numbered in the order in which they are first "
            "trained; fp8compile.delayed.reset(), before loading, forgets those of this process.",
            Fp8Warning,
            stacklevel=2,
        )


def _pass_of(key: str, device: torch.device) -> _Pass:
    owner = key.partition("/")[0], device
    if owner not in _passes:
        none = torch.zeros((), dtype=torch.bool, device=device)
        _passes[owner] = _Pass(none, none.clone())
    return _passes[owner]


def namespace(inputs: Sequence[Any], trains: bool = True) -> str:
    """Return a name for the model of a graph with these inputs: model0, model1, … in order of first compilation.

    trains: the graph has a backward half, and so histories. Any other has no name.
    """
    if not trains:
        return ""
    mine = Parameters(inputs)
    for index, known in _models.items():
        if mine.are_of_one_model(known):
            return f"model{index}"
    index = next((i for i, known in _models.items() if known.are_gone()), len(_models))
    _models[index] = mine
    for key in [k for k in _histories if k.startswith(f"model{index}/") and k not in _loaded]:
        del _histories[key], _before[key]  # of a model that is gone
    for owner in [owner for owner in _passes if owner[0] == f"model{index}"]:
        del _passes[owner]
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
    _loaded.update(state)


def reset() -> None:
    """Forget every history and every model."""
    process_state.reset_module(__name__)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Put back, at the end of this context, all histories as they were, and which models they belong to."""
    before, models, loaded = state_dict(), dict(_models), set(_loaded)
    try:
        yield
    finally:
        reset()
        _models.update(models)
        load_state_dict(before)
        _loaded.intersection_update(loaded)
