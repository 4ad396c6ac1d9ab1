"""Free the weights of a frozen model that its compiled graphs read in FP8 alone: payloads are half as large.

model = fp8compile.freeze(model)
with torch.no_grad(): model.generate(…)        # every kind of call, once
fp8compile.free_weights(model)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code  # or Dynamo compiles what refuses calls that are not compiled

from fp8compile import frozen_weights
from fp8compile.errors import FreedWeightError

GUARDED = "_fp8_refuses_freed"  # the attribute of a module whose calls and files are watched


def free_weights(model: nn.Module) -> int:
    """Free the memory of weights that are only cast, and return how many bytes.

    Call it when every kind of call has run once (prompts, tokens, batch sizes): what a graph reads in BF16 stays, and
    a graph that needs a freed weight later raises. The next call of each kind is traced anew. A freed weight shows NaN,
    and cannot be written, saved or loaded: load into a new model, and freeze that.

    Only for a model whose weights nothing reads but compiled graphs and the calls of its modules: what Python reads of
    them in between (a comparison, a stride, a copy of the model) finds NaN, in one element.

    Raises `FreedWeightError` if no weight is only cast, or one was written since it was last cast.
    """
    owners = {
        id(parameter): (module, parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and frozen_weights.is_cast_alone(parameter)
    }
    if not owners:
        raise FreedWeightError(
            "no weight of this model is only cast: run it once after fp8compile.freeze; what graphs read in BF16 stays"
        )
    for _, parameter in owners.values():
        frozen_weights.refuse_written(parameter)
    count = sum(frozen_weights.free(parameter) for _, parameter in owners.values())
    for module in {id(module): module for module in (model, *(module for module, _ in owners.values()))}.values():
        if not getattr(module, GUARDED, False):
            setattr(module, GUARDED, True)
            module.register_state_dict_pre_hook(_refuse_files)
            module.register_load_state_dict_pre_hook(_refuse_files)
            module.register_forward_pre_hook(_refuse_eager_calls)
    return count


def _refuse_files(module: nn.Module, *_: Any) -> None:
    names = [name for name, parameter in module.named_parameters() if frozen_weights.is_freed(parameter)]
    if names:
        raise FreedWeightError(
            f"{type(module).__name__}: {names[0]} was freed (fp8compile.free_weights), and cannot be saved or loaded: "
            "save before that, or load into a new model and freeze that"
        )


def _refuse_eager_calls(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    names = [name for name, parameter in module.named_parameters(recurse=False) if frozen_weights.is_freed(parameter)]
    if names:
        raise FreedWeightError(
            f"{type(module).__name__}: {names[0]} was freed (fp8compile.free_weights), and this call is not compiled: "
            "torch gives up after torch._dynamo.config.recompile_limit kinds of calls, of which each counts twice"
        )


skip_code(_refuse_eager_calls.__code__)
