"""Compiled functions and modules, as `explain` meets them: what is beneath, and the options of their FP8 backend.

torch keeps both on what torch.compile returns: `dynamo_ctx` of a module, a variable of the wrapper of a function, and
the wrapper in `_compiled_call_impl` after `model.compile()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from fp8compile.errors import Fp8Error
from fp8compile.insight.optimizer_rows import optimizer_of

Options = Mapping[str, Any]


def uncompiled(target: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """Return what torch.compile was given, and the options of its FP8 backend."""
    beneath = getattr(target, "_orig_mod", None) or getattr(target, "_torchdynamo_orig_callable", None)
    if getattr(target, "_torchdynamo_disable", False):  # not compiled, but kept from it: steps of torch's LBFGS are
        beneath = None
    return beneath or target, _options_of(target) or {}


def context_of(target: Any) -> Any:
    """Return torch's record of a torch.compile, if `target` came from it, or is a module that was told to compile."""
    for made in (target, getattr(target, "_compiled_call_impl", None)):
        if (context := getattr(made, "dynamo_ctx", None)) is not None:
            return context
        if inspect.isfunction(made) and hasattr(made, "_torchdynamo_orig_callable"):
            context = inspect.getclosurevars(made).nonlocals.get("self")
            if hasattr(context, "callback"):
                return context
    return None


def options_within(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Options, dict[Optimizer, Options]]:
    """Return the options of models, and those of optimizers' steps, that a plain function finds compiled with "fp8".

    Looks at variables around the function and attributes of its object, as far as it names them, and at arguments.
    Raises `Fp8Error` where two models have different ones.
    """
    of_models: list[Options] = []
    of_optimizers: dict[Optimizer, Options] = {}
    for value in (*_named_by(step), *args, *kwargs.values()):
        options = _options_of(value)
        if options is None:
            continue
        opt = optimizer_of(uncompiled(value)[0])
        if opt is not None:
            of_optimizers[opt] = options
        elif options not in of_models:
            of_models.append(options)
    if len(of_models) > 1:
        raise Fp8Error(
            f"explain: this step calls models that were compiled with different options ({of_models[0]} and "
            f"{of_models[1]}): explain each of them, or give options=… for all"
        )
    return (of_models or [{}])[0], of_optimizers


def _named_by(step: Callable[..., Any]) -> Iterator[Any]:
    function, own = getattr(step, "__func__", step), getattr(step, "__self__", None)
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from (*found.nonlocals.values(), *found.globals.values())
        yield from (
            getattr(own, name, None) for name in function.__code__.co_names if name in getattr(own, "__dict__", ())
        )


def _options_of(target: Any) -> Options | None:
    """Return the options of an FP8 backend; None where `target` has been compiled with another, or not at all."""
    backend = getattr(context_of(target), "callback", None)
    while backend is not None:
        if getattr(backend, "compiler_name", None) == "fp8":
            return (getattr(backend, "kwargs", None) or {}).get("options") or {}
        backend = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(
            backend, "_torchdynamo_orig_callable", None
        )
    return None
