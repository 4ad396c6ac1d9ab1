"""Optimizers that were made with `fused=True`: an implementation's name, and the compiled step takes its place.

torch's fused kernel keeps plain states, and torch.compile does not see into it. The rule that it computes is that of
the same optimizer without the flag, so the flag is taken off, and is put back in checkpoints for other optimizers
(`plain_state_dict`). Left to torch's kernel are steps whose states a recipe keeps plain, and optimizers that are not
torch's own.

torch.amp.GradScaler leaves the unscaling to a fused optimizer. To one whose flag was taken off it does not: it unscales
gradients itself, unless the optimizer was prepared with `unscale=True` (`unscaling.py` then tells it). A step that it
has begun in the other way is still torch's.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fp8compile.optimizer.state_conversion import record_of
from fp8compile.optimizer.state_recipe import StateRecipe
from fp8compile.optimizer.torch_methods import is_torchs
from fp8compile.optimizer.unscaling import NAMES

SCALES = "_step_supports_amp_scaling"  # torch's name for: GradScaler leaves unscaling to this optimizer


def is_fused(opt: Optimizer) -> bool:
    """Return True if a group of `opt` is stepped by torch's fused kernel."""
    return any(group.get("fused") for group in opt.param_groups)


def can_be_taken_over(opt: Optimizer, recipe: StateRecipe) -> bool:
    """Return True if compiled steps do what the fused kernel does, and keep states of `opt` in fewer bits."""
    return is_fused(opt) and is_torchs(opt, "step") and not recipe.keeps_all_plain


def is_being_unscaled(opt: Optimizer) -> bool:
    """Return True if GradScaler has left the scale of the gradients of this step to `opt`."""
    return any(vars(opt).get(name) is not None for name in NAMES)


def take_over(opt: Optimizer) -> None:
    """Take the flag off all groups of `opt`, and off those that will be added; step counts stay on the device."""
    given = record_of(opt).fused
    for index, group in enumerate(opt.param_groups):
        if group.get("fused"):
            given[index] = group["fused"]
            take_over_group(group)
    if opt.defaults.get("fused"):
        opt.defaults["fused"] = None
    vars(opt).pop(SCALES, None)


def take_over_group(group: dict[str, Any]) -> None:
    """Take the flag off one group. The fused kernel has step counts on the device, as capturable steps have."""
    group["fused"] = None
    if "capturable" in group and all(p.is_cuda for p in group["params"]):
        group["capturable"] = True
