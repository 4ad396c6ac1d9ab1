"""Free the weights of a frozen model that its compiled graphs read in FP8 alone: payloads are half as large.

model = fp8compile.freeze(model)
with torch.no_grad(): model.generate(…)        # every kind of call, once
fp8compile.free_weights(model)
"""

from __future__ import annotations

from torch import nn

from fp8compile import weight_uses
from fp8compile.errors import FreedWeightError
from fp8compile.serving.freed_modules import guard


def free_weights(model: nn.Module) -> int:
    """Free the memory of weights that are only cast, and return how many bytes.

    Call it when every kind of call has run once (prompts, tokens, batch sizes): what a graph reads in BF16 stays, and
    a graph that needs a freed weight later raises. The next call of each kind is traced anew. A freed weight shows NaN,
    and cannot be written, saved, loaded, copied or converted: load into a new model, and freeze that.

    Only for a model whose weights nothing reads but compiled graphs and the calls of its modules: what Python reads of
    them in between (a comparison, a stride) finds NaN, in one element.

    Raises `FreedWeightError` if no weight is only cast, or one was written since it was last cast.
    """
    root = getattr(model, "_orig_mod", model)  # of what torch.compile returned
    weights = {id(p): (name, p) for name, p in root.named_parameters() if weight_uses.is_cast_alone(p)}
    if not weights:
        raise FreedWeightError(
            "no weight of this model is only cast: run it once after fp8compile.freeze; what graphs read in BF16 stays"
        )
    for _, weight in weights.values():
        weight_uses.refuse_written(weight)
    owners = [module for module in model.modules() if any(id(p) in weights for p in module._parameters.values())]
    guard({id(module): module for module in (root, *owners)}.values())
    return sum(weight_uses.free(weight, name) for name, weight in weights.values())
