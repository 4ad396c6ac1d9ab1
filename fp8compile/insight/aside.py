"""Compiling aside: nothing that torch keeps of it mixes with what it keeps of the user's own compilations."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import config as dynamo_config  # compiling aside must not use up a model's recompilations
from torch._dynamo import pgo  # nor tell it of sizes that it has not seen

LIMITS = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


def function_aside(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for this one compilation: what Dynamo keeps of it never mixes with the model's.

    Of a function it is a copy, so that modules have the same paths as in the function itself.
    """
    function = getattr(target, "__func__", target)
    if isinstance(function, types.FunctionType):
        code = function.__code__.replace()
        rest = (function.__name__, function.__defaults__, function.__closure__)
        twin = types.FunctionType(code, function.__globals__, *rest)
        twin.__kwdefaults__ = function.__kwdefaults__
        return twin if function is target else types.MethodType(twin, target.__self__)  # type: ignore[attr-defined]

    def model(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    model.__code__ = model.__code__.replace()
    return model


def backend_aside() -> Callable[..., Any]:
    """The backend as an object of its own: a function after a graph break, known to Dynamo, is compiled again."""
    from fp8compile import compiled_calls
    from fp8compile.backend import fp8  # here, so that looking at plans imports no compiler

    aside: Any = functools.partial(fp8)
    aside.__name__ = "fp8"  # what errors call it
    compiled_calls.watch(aside)  # of a call that reaches no graph it is told why
    return aside


@contextlib.contextmanager
def recompiling() -> Iterator[None]:
    """No limit to recompiling; sizes seen here are forgotten, or those of a later compilation would become symbols."""
    sizes = pgo.get_code_state()
    before = copy.deepcopy(dict(sizes))
    try:
        with dynamo_config.patch(LIMITS):  # type: ignore[attr-defined]
            yield
    finally:
        sizes.clear()
        sizes.update(before)
