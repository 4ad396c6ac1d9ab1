"""explain: compile a model aside and say what was decided, leaving the model as it was.

The graphs run once, on the given arguments, because torch compiles a backward half when it is first needed. What that
changes is put back: gradients, buffers, attributes, random state, amax histories, and parameters that a training step
changes by itself. An optimizer's step ends the run, and nothing of it happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves  # what a model returns may nest

from fp8compile.errors import Fp8Error
from fp8compile.insight.compiled_targets import context_of, options_within, uncompiled
from fp8compile.insight.explanation import Explanation
from fp8compile.insight.isolation import backend_aside, function_aside, recompiling, unchanged
from fp8compile.insight.optimizer_rows import optimizer_of, optimizer_plan
from fp8compile.plan import store
from fp8compile.torch_hooks.calls.compilations import reportable


class _OptimizerReached(Exception):  # noqa: N818
    """A step has come to its optimizer: all that there is to explain has been compiled."""


def explain(
    target: Callable[..., Any],
    /,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Return what `torch.compile(target, backend="fp8", options=options)` decides for target(*args, **kwargs).

    target: a model; a compiled model (then `options` are its own, unless given); or a function, such as a training
    step with its own `backward()`, which runs up to its optimizer's step; or the step of an optimizer alone, which
    does not run: which of its states are kept in 8 bits, and why.
    loss: makes of a model's output the scalar whose backward is compiled. Without it: the output's `loss`, where it has
    one, or the sum of its floating-point tensors. No backward where nothing requires a gradient.
    options: as for the backend; of a step that is not compiled itself by default those of the models and of the
    optimizer's step that it calls compiled. `executor` is "eager" unless given: the decisions and kernels are the same
    ones, and compiling takes a tenth of the time.
    The automatic mode is left out: what is explained is what it starts from.
    The model is as it was afterwards; so is `last_compile()`. Raises what the model or, if `strict`, a pass raises.
    """
    original, known = uncompiled(target)
    context = context_of(target)
    of_optimizers: dict[Optimizer, Mapping[str, Any]] = {}
    if options is None and context is None and not isinstance(original, nn.Module):
        known, of_optimizers = options_within(original, args, kwargs)
    if (opt := optimizer_of(original)) is not None:
        return Explanation([optimizer_plan(opt, known if options is None else options)])
    chosen = {"executor": "eager", **(known if options is None else options), "adaptive": None}
    reached: list[Optimizer] = []
    with unchanged(original, args, kwargs), store.collected() as found, _no_optimizer_step(reached), recompiling():
        dynamic = getattr(context, "_dynamic", None)  # as a compiled model was told
        compiled = torch.compile(function_aside(original), backend=backend_aside(), options=chosen, dynamic=dynamic)
        output = compiled(*args, **kwargs)
        if isinstance(original, nn.Module) or loss is not None:
            _backward(output, loss)
    return Explanation(reportable(found) + [optimizer_plan(opt, of_optimizers.get(opt, chosen)) for opt in reached])


@contextlib.contextmanager
def _no_optimizer_step(reached: list[Optimizer]) -> Iterator[None]:
    def stop(opt: Optimizer, *_: Any) -> None:
        reached.append(opt)
        raise _OptimizerReached

    hook = register_optimizer_step_pre_hook(stop)
    try:
        with contextlib.suppress(_OptimizerReached):
            yield
    finally:
        hook.remove()


def _backward(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
    scalar = loss(output) if loss is not None else _default_loss(output)
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        raise Fp8Error(_no_scalar(scalar, loss is not None))
    if scalar.requires_grad:
        scalar.backward()


def _no_scalar(found: Any, given: bool) -> str:
    """Return what is wrong with a loss, and what to do."""
    what = f"a {type(found).__name__}"
    if isinstance(found, torch.Tensor):
        what = f"a tensor of shape {list(found.shape)}"
    where = "what loss=… returns" if given else "the `loss` of the model's output"
    return (
        f"explain: backward begins at one number, and {where} is {what}. Give a loss that reduces it, such as "
        "loss=lambda output: output.float().mean(), with the part of your model's output that you train in its place"
    )


def _default_loss(output: Any) -> torch.Tensor:
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    trained = [x.float().sum() for x in leaves if x.requires_grad]
    return torch.stack(trained).sum() if trained else torch.zeros((), dtype=torch.float32, device="cpu")
