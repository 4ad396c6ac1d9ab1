"""Modules whose weights were freed: they refuse to run uncompiled, to be converted, copied, saved or loaded.

Such a module gets methods of its own in front of its class's. `forward` asks whether it is being compiled, which is
True of the code that Dynamo makes of it, and False where torch has given it up. Not known is so: a forward after a
graph break of its own, one that reads a weight of another module, and what another backend compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code  # or Dynamo compiles what refuses calls that are not compiled

from fp8compile import weight_uses
from fp8compile.errors import FreedWeightError

GUARD = "_fp8_guard"  # the attribute of a module with what it had before


def guard(modules: Iterable[nn.Module]) -> None:
    """Let modules refuse from now on what would find NaN in their freed weights, or in those of modules below.

    Raises `FreedWeightError`, and changes none, where the forward of one cannot be replaced.
    """
    new = [module for module in modules if GUARD not in vars(module)]
    for module in new:
        if isinstance(getattr(type(module), "forward", None), property):
            raise FreedWeightError(f"{type(module).__name__}: weights are not freed where forward is a property")
    for module in new:
        module.register_state_dict_pre_hook(_refuse_files)
        module.register_load_state_dict_pre_hook(_refuse_files)
        own: dict[str, Any] = {"forward": _compiled_only(module.forward, module)}
        own |= {"_apply": MethodType(_apply, module), "__reduce_ex__": MethodType(_reduce, module)}
        before = {name: vars(module)[name] for name in own if name in vars(module)}
        vars(module).update({**own, GUARD: before})


def _compiled_only(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a forward that raises where freed weights would be read by Python, or by a program that is exported."""

    @functools.wraps(forward)
    def compiled_only(*args: Any, **kwargs: Any) -> Any:
        # Parameters are other tensors then. (Dynamo of torch 2.11 takes `is_exporting()` for true wherever it traces.)
        if torch.compiler._is_exporting_flag:
            raise FreedWeightError("weights were freed (fp8compile.free_weights): torch.export would keep NaN of them")
        if not torch.compiler.is_compiling():
            _refuse_eager(module)
        return forward(*args, **kwargs)

    made = cast("FunctionType", compiled_only)
    made.__code__ = made.__code__.replace(co_name=made.__name__)  # of its own: torch counts kinds of calls by code
    return made


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Refuse another dtype or device, before anything is converted."""
    for name, parameter in self.named_parameters(recurse=recurse):
        nothing = weight_uses.shown_of(parameter)
        if nothing is not None and fn(nothing) is not nothing:
            _refuse(self, name, "converted or moved: do that before")
    return _had(self, "_apply")(fn, recurse)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Refuse to be copied or pickled; with all memory given again, be without a guard."""
    refuse_freed(self, "copied or pickled: do that before")
    function, arguments, state, *rest = _had(self, "__reduce_ex__")(protocol)
    own = {name: x for name, x in state.items() if name not in (GUARD, "forward", "_apply", "__reduce_ex__")}
    return function, arguments, {**own, **vars(self)[GUARD]}, *rest


def _had(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method as the module had it before."""
    before = vars(module)[GUARD].get(name)
    return getattr(type(module), name).__get__(module) if before is None else before


def refuse_freed(module: nn.Module, what: str) -> None:
    """Raise if a weight of a module, or of one below, was freed."""
    for name, parameter in module.named_parameters():
        if weight_uses.is_freed(parameter):
            _refuse(module, name, what)


def _refuse(module: nn.Module, name: str, what: str) -> None:
    raise FreedWeightError(f"{type(module).__name__}: {name} was freed (fp8compile.free_weights), and cannot be {what}")


def _refuse_files(module: nn.Module, *_: Any) -> None:
    refuse_freed(module, "saved or loaded: save before that, or load into a new model and freeze that")


def _refuse_eager(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and weight_uses.is_freed(parameter):
            raise FreedWeightError(
                f"{type(module).__name__}: {name} was freed (fp8compile.free_weights), and this call is not compiled: "
                "it is made outside of the model that was frozen, or torch gave it up after "
                "torch._dynamo.config.recompile_limit kinds of calls"
            )


for _function in (_refuse_eager, weight_uses.is_freed):
    skip_code(_function.__code__)
