"""Delayed scaling: scales from the amax history of a tensor, kept between steps and saved with checkpoints.

    scale_t = max(amax_{t-1}, …, amax_{t-history}) · 2^margin / format max

The guard: where this step's amax would saturate under that scale, is not finite, or no history exists yet, the scale
of this step is the current one. A non-finite amax does not enter the history, so a skipped step leaves it untouched.

Histories live here, by key (`model<i>/<module path>/<role>/<operand>`), one FP32 tensor [history] on the device of the
tensor they describe. `state_dict` and `load_state_dict` carry them through a checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8compile.errors import Fp8Error
from fp8compile.formats import FORMATS
from fp8compile.kernels import reference

_histories: dict[str, Tensor] = {}
_models: dict[int, weakref.ref[torch.nn.Parameter]] = {}


def scale(amax: Tensor, key: str, format: str, history: int, margin: int, power_of_two: bool = False) -> Tensor:
    """The scale of this step (FP32 []), from the history under `key`; records `amax` (FP32 [])."""
    past = _history(key, history, amax.device)
    expected = past.amax() * 2.0**margin
    usable = (amax <= expected) & torch.isfinite(amax)  # FP32 division rounds amax/expected ≤ 1 to ≤ 1: no saturation
    chosen = torch.where(usable, expected, amax)
    recorded = torch.where(torch.isfinite(amax), torch.cat([amax.reshape(1), past[:-1]]), past)
    past.copy_(recorded)
    return reference.scale(chosen, FORMATS[format].name, power_of_two)


def _history(key: str, length: int, device: torch.device) -> Tensor:
    kept = _histories.get(key)
    if kept is None or kept.shape[0] != length or kept.device != device:
        fresh = torch.zeros(length, device=device)
        if kept is not None:
            n = min(length, kept.shape[0])
            fresh[:n] = kept[:n].to(device)
        _histories[key] = kept = fresh
    return kept


def namespace(parameters: list[torch.nn.Parameter]) -> str:
    """A name for the model these parameters belong to: model0, model1, … in order of first compilation."""
    for index, known in _models.items():
        owner = known()
        if owner is not None and any(owner is p for p in parameters):
            return f"model{index}"
    index = len(_models)
    if parameters:
        _models[index] = weakref.ref(parameters[0])
    return f"model{index}"


def state_dict() -> dict[str, Tensor]:
    """All amax histories of this process, copied: key → FP32 [history]. Save it beside the model's own state."""
    return {key: kept.clone() for key, kept in _histories.items()}


def load_state_dict(state: Mapping[str, Tensor]) -> None:
    """Put back what `state_dict` gave; call it before the next step. Raises `Fp8Error` for anything else."""
    for key, kept in state.items():
        if not isinstance(kept, Tensor) or kept.dim() != 1 or not kept.is_floating_point():
            raise Fp8Error(f"delayed scaling: {key!r} is not an amax history (a 1-D float tensor)")
    for key, kept in state.items():
        mine = _histories.get(key)
        if mine is not None and mine.shape == kept.shape:
            mine.copy_(kept)
        else:
            _histories[key] = kept.detach().clone().float()


def reset() -> None:
    """Forget every history and every model."""
    _histories.clear()
    _models.clear()
