"""What Hugging Face's Trainer does with an optimizer while it trains a compiled model: it steps it uncompiled.

By default that is torch's fused AdamW, so nothing would tell its user that states are not in 8 bits. A trainer is found
among the frames that run while the model is compiled, as the optimizer of a step is.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.optim import Optimizer

from fp8compile.torch_hooks.calls.user_frame import warn_user

_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def warn_of_fused_optimizer() -> None:
    """Say once where a Trainer steps a fused optimizer, whose states stay plain."""
    opt = _trainers_optimizer()
    if opt is None or opt in _warned or not any(group.get("fused") for group in opt.param_groups):
        return
    _warned.add(opt)
    warn_user(
        f"fp8: Trainer steps {type(opt).__name__}(fused=True), its default, without compiling it: the model is in FP8, "
        "and the optimizer's states stay as they are. For states in 8 bits give Trainer an optimizer whose step is "
        'compiled (docs/trainers.md, "Optimizers that a library steps"); to leave them on purpose, '
        'TrainingArguments(optim="adamw_torch").'
    )


def _trainers_optimizer() -> Optimizer | None:
    """Return the optimizer of the Trainer that is running, without accelerate's wrapper; None if none runs."""
    kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame = sys._getframe(1) if kind is not None else None
    while frame is not None:
        owner: Any = frame.f_locals.get("self") if frame.f_code.co_name in ("training_step", "compute_loss") else None
        if isinstance(owner, kind):  # type: ignore[arg-type]
            opt = getattr(owner.optimizer, "optimizer", owner.optimizer)
            return opt if isinstance(opt, Optimizer) else None
        frame = frame.f_back
    return None
