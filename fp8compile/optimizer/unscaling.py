"""Loss scales in the compiled step: gradients are unscaled as they are loaded, a step that overflowed writes nothing.

    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), capturable=True), unscale=True)
    opt.step = torch.compile(opt.step, backend="fp8")
    scaler.step(opt)

An optimizer with `_step_supports_amp_scaling` gets `grad_scale` and `found_inf` from `torch.amp.GradScaler`, and its
step is always called. A hook takes both off before each step (torch's optimizers refuse them where they are not fused)
and writes them to two numbers that the compiled step reads, 1 and 0 where nobody scales: so nothing is compiled again,
and the host reads nothing. The first step, which compiles, is still torch's: until then nobody says so.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from fp8compile.errors import OptionError, StateError
from fp8compile.optimizer.state_conversion import parameters_of
from fp8compile.passes.core.stages import UnscaledGradients

NAMES = ("grad_scale", "found_inf")
DTYPES = (torch.float32, torch.bfloat16)  # GradScaler refuses gradients in FP16


@dataclass
class Unscaling:
    """The numbers that compiled steps of an optimizer read, on each device on which one does."""

    numbers: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    neutral: bool = True
    given: bool = False  # whether GradScaler told something for this step

    def set(self, scale: Tensor | None, found: Tensor | None) -> None:
        """Set the numbers for the next step; 1/scale as GradScaler has it, computed in FP64 and rounded to FP32."""
        neutral = scale is None and found is None
        for inverse, overflow in () if neutral and self.neutral else self.numbers.values():
            inverse.fill_(1.0) if scale is None else inverse.copy_(scale.double().reciprocal())
            overflow.fill_(0.0) if found is None else overflow.copy_(found)
        self.neutral = neutral


_unscaling: weakref.WeakKeyDictionary[Optimizer, Unscaling] = weakref.WeakKeyDictionary()


def enable(opt: Optimizer) -> None:
    """Let compiled steps of `opt` unscale; raises `OptionError` where a step cannot be skipped on the device."""
    if opt in _unscaling:
        return
    if type(opt).__module__.split(".")[:2] != ["torch", "optim"]:
        raise OptionError(
            f"unscale=True is for the optimizers of torch.optim: {type(opt).__name__} may count its steps in Python, "
            "and a step that is skipped on the device would be counted. Without it GradScaler skips such steps itself"
        )
    if isinstance(opt, SGD) and any(group["momentum"] for group in opt.param_groups):
        raise OptionError(
            "unscale=True is not for SGD with momentum, which makes its states while it steps: from a step that "
            "overflowed they would keep the overflow. Without it GradScaler skips such steps itself"
        )
    _unscaling[opt] = Unscaling()
    opt.register_step_pre_hook(_before_step)  # type: ignore[arg-type]
    opt.register_step_post_hook(_after_step)  # type: ignore[arg-type]


@torch.compiler.disable
def _before_step(opt: Any, args: Any, kwargs: Any) -> None:
    """Take what GradScaler left on `opt`; and let it do so if `opt.step` has been exchanged for a compiled one."""
    mine = _unscaling[opt]
    mine.given = "found_inf" in vars(opt)
    with torch.no_grad():
        mine.set(*(vars(opt).pop(name, None) for name in NAMES))  # no None is left: Dynamo would compile once more
    opt._step_supports_amp_scaling = bool(mine.numbers) and "step" in vars(opt)


@torch.compiler.disable
def _after_step(opt: Any, args: Any, kwargs: Any) -> None:
    if _unscaling[opt].given:  # GradScaler deletes them
        vars(opt).update(dict.fromkeys(NAMES))


def unscaled_by(opt: Optimizer) -> UnscaledGradients | None:
    """Return which gradients a compiled step of `opt` unscales, and by which numbers; None where nobody wants that."""
    mine = _unscaling.get(opt)
    if mine is None:
        return None
    if reason := _refusal(opt):
        raise StateError(f"{reason}, so unscale=True cannot be: prepare the optimizer without it")
    device = _device(opt)
    if device not in mine.numbers:
        fp32 = {"dtype": torch.float32, "device": device}
        mine.numbers[device] = torch.ones((), **fp32), torch.zeros((), **fp32)
        given = next((numbers for at, numbers in mine.numbers.items() if at != device), None)
        for new, x in zip(mine.numbers[device], given or (), strict=False):
            new.copy_(x)  # the step under way has been told already
    opt._step_supports_amp_scaling = "step" in vars(opt)  # type: ignore[attr-defined]
    gradients = frozenset(id(p.grad) for p in parameters_of(opt) if p.grad is not None)
    return UnscaledGradients(gradients, mine.numbers[device])


def _refusal(opt: Optimizer) -> str:
    """Return the reason why compiled steps of `opt` cannot unscale its gradients; "" if they can."""
    gradients = [p.grad for p in parameters_of(opt) if p.grad is not None]
    if any(isinstance(g, DTensor) for g in gradients):
        return "gradients are distributed tensors"
    if len({g.device for g in gradients}) > 1:
        return "parameters are on several devices"
    if strange := {str(g.dtype) for g in gradients if g.dtype not in DTYPES}:
        return f"gradients are {', '.join(sorted(strange))}"
    return ""


def _device(opt: Optimizer) -> torch.device:
    """Return the device of the step counts: a step that is not counted must be known there."""
    counts = [
        x for state in opt.state.values() for x in state.values() if isinstance(x, Tensor) and not x.dim() and x.numel()
    ]
    return next((x.device for x in (*counts, *parameters_of(opt))), torch.device("cpu"))
