"""Freeze a model for inference: its weights are cast to FP8 once, and payloads and scales are kept beside them.

model = fp8compile.freeze(model)
with torch.no_grad(): model.generate(…)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8compile import weight_uses
from fp8compile.errors import OptionError, ShardingError

Model = TypeVar("Model", bound=nn.Module)


def freeze(
    model: Model, *, options: Mapping[str, Any] | None = None, mode: str | None = None, dynamic: bool | None = None
) -> Model:
    """Compile `model` in place for inference with FP8 weights that are cast once, and return it, in eval mode.

    A module whose class or forward is torch's own (`nn.Sequential`, a traced module) is returned within a compiled one,
    as `torch.compile` does. Of what `torch.compile` has returned, the model within is frozen: what it was compiled with
    goes.
    No parameter needs a gradient then. options: of the backend, to which `frozen` is added; mode, dynamic: of
    `torch.compile`.
    A weight that is written afterwards (`load_state_dict`, `copy_`) is cast again at the next call. Writes through
    `.data`, and into memory that `p.data = …` has given a parameter, are not counted by torch: call `freeze` again
    after those.

    Raises `ShardingError` for a model that is sharded, `OptionError` for one that was made in `torch.inference_mode()`.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile returned
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ShardingError("FSDP gathers weights anew in every call: freeze a model whose parameters are whole")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ShardingError(f"{name} is sharded: freeze a model whose parameters are whole")
        if parameter.is_inference():
            raise OptionError(
                f"{name} was made in torch.inference_mode(), where torch does not count writes: make the model outside"
            )
    # What is kept of them is out of date, but of those whose memory was freed: there is nothing else of them.
    increment_version([p for p in model.parameters() if not weight_uses.is_freed(p)])
    model.eval().requires_grad_(False)
    given = {**(options or {}), "frozen": True, **({"mode": mode} if mode else {})}  # torch takes one or the other
    origins = (type(model).__module__, getattr(model.forward, "__module__", None) or "")
    if any(origin.partition(".")[0] == "torch" for origin in origins):  # module.compile() takes up none of these
        wrapped: Any = torch.compile(model, backend="fp8", options=given, dynamic=dynamic)
        return wrapped
    model.compile(backend="fp8", options=given, dynamic=dynamic)
    return model
