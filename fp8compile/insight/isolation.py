"""Compile and run a user's function aside, and put everything back as it was.

`backend_aside`, `function_aside` and `recompiling` keep what torch remembers of the compilation apart from the user's
own. `unchanged` puts back gradients, buffers, attributes, random state and amax histories of the models it reaches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config  # compiling aside must not use up a model's recompilations
from torch._dynamo import pgo  # nor tell it of sizes that it has not seen
from torch.utils._pytree import tree_leaves  # arguments nest

from fp8compile import delayed

LIMITS = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


def function_aside(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own for this one compilation: what Dynamo keeps of it never mixes with the model's.

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
    """Return the backend as an object of its own: functions after a graph break, known to Dynamo, compile again."""
    from fp8compile.backend import fp8  # here, so that looking at plans imports no compiler
    from fp8compile.torch_hooks.calls import compiled_calls

    aside: Any = functools.partial(fp8)
    aside.__name__ = "fp8"  # what errors call it
    compiled_calls.watch(aside)  # of a call that reaches no graph it is told why
    return aside


@contextlib.contextmanager
def recompiling() -> Iterator[None]:
    """Set no limit to recompiling; forget the sizes seen here, which would become symbols in later compilations."""
    sizes = pgo.get_code_state()
    before = copy.deepcopy(dict(sizes))
    try:
        with dynamo_config.patch(LIMITS):  # type: ignore[attr-defined]
            yield
    finally:
        sizes.clear()
        sizes.update(before)


DICTS = ("_buffers", "_parameters")


@contextlib.contextmanager
def unchanged(target: Callable[..., Any], *more: Any) -> Iterator[None]:
    """Put back everything that running `target` changes of the models it reaches, and the random state.

    A model's parameters are copied only for a function that is no model: a training step may write them.
    """
    reached = list(_reach([target, *tree_leaves(more)]))
    modules = {m: None for x in reached if isinstance(x, nn.Module) for m in x.modules()}
    given = [x for x in tree_leaves(more) if isinstance(x, torch.Tensor)]
    scalers = [x for x in reached if isinstance(x, torch.amp.GradScaler)]
    with (
        _random_state(),
        _gradients([*given, *(p for m in modules for p in m._parameters.values() if p is not None)]),
        _values(modules, with_parameters=not isinstance(target, nn.Module)),
        _attributes([*modules, *scalers]),
        delayed.unchanged(),
    ):
        yield


def _reach(roots: Iterable[Any]) -> Iterator[Any]:
    """Return what a function can see: its closure, its object, its defaults, the globals that it names."""
    stack, seen = list(roots), set()
    while stack:
        x = stack.pop()
        if id(x) not in seen:
            seen.add(id(x))
            yield x
            stack += _seen_by(x)


def _seen_by(x: Any) -> list[Any]:
    if isinstance(x, (nn.Module, type, torch.Tensor)):
        return []
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    function = getattr(x, "__func__", x)
    owner = [x.__self__] if hasattr(x, "__self__") else []
    code = getattr(function, "__code__", None)
    if code is None:
        return owner + [y for y in getattr(x, "__dict__", {}).values() if isinstance(y, nn.Module)]
    cells = [c.cell_contents for c in function.__closure__ or () if _is_filled(c)]
    names = [function.__globals__[n] for n in code.co_names if n in function.__globals__]
    return [*owner, *(y for y in (*cells, *names) if _may_hold_a_model(y)), *(function.__defaults__ or ())]


def _may_hold_a_model(x: Any) -> bool:
    """Return True for a model, a scaler, or a function or object of the user's."""
    if isinstance(x, (nn.Module, torch.amp.GradScaler)):
        return True
    name = getattr(x, "__module__", None) or type(x).__module__
    return not isinstance(x, type) and not str(name).startswith(("torch", "builtins", "numpy"))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda):
        yield


@contextlib.contextmanager
def _gradients(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take gradients away and put them back: nothing is added to them, and they are not copied."""
    before = [(x, x.grad) for x in dict.fromkeys(tensors) if x.is_leaf]
    for x, _ in before:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in before:
            x.grad = grad


@contextlib.contextmanager
def _values(modules: Iterable[nn.Module], with_parameters: bool) -> Iterator[None]:
    tensors = {b: None for m in modules for b in m._buffers.values() if b is not None}
    if with_parameters:
        tensors |= {p: None for m in modules for p in m._parameters.values() if p is not None}
    copies = [(x, x.detach().clone(), x._version) for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, copy, version in copies:
                if x._version != version:
                    x.copy_(copy)


@contextlib.contextmanager
def _attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Put back counters, flags and dictionaries of modules; let no compiled call of theirs run in the meantime."""
    before = [(x, {k: _shallow(v) for k, v in vars(x).items()}) for x in owners]
    for x, _ in before:
        if isinstance(x, nn.Module):
            x._compiled_call_impl = None
    try:
        yield
    finally:
        for x, attributes in before:
            for name in [n for n in vars(x) if n not in attributes]:
                del x.__dict__[name]
            for name, kept in attributes.items():
                current = x.__dict__.get(name)
                if type(kept) is dict and isinstance(current, dict):
                    current.clear()
                    current.update(kept)
                else:
                    x.__dict__[name] = kept


def _shallow(value: Any) -> Any:
    return dict(value) if type(value) is dict else value
