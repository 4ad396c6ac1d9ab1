"""Modules whose weights were freed: they refuse to run uncompiled, to be converted, copied, saved or loaded.

Such a module gets a class of its own, of the same name, which is its class's with four methods around: as torch does
for `fully_shard` and for parametrizations. `forward` asks whether it is being compiled, which is True of the code that
Dynamo makes of it, and False where torch has given it up. Where a forward has a graph break, that is known of its
beginning only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code  # or Dynamo compiles what refuses calls that are not compiled

from fp8compile import frozen_weights
from fp8compile.errors import FreedWeightError


class FreedModule(nn.Module):
    """Mixed into the class of a module that has freed weights, or is the root of those that have."""

    _fp8_class: type[nn.Module]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse another dtype or device, before anything is converted."""
        for name, parameter in self.named_parameters(recurse=recurse):
            nothing = frozen_weights.shown_of(parameter)
            if nothing is not None and fn(nothing) is not nothing:
                refuse(self, name, "converted or moved: do that before")
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled; with all memory given again, be an object of the class that it had."""
        refuse_freed(self, "copied or pickled: do that before")
        function, (_, *arguments), *rest = super().__reduce_ex__(protocol)
        return function, (self._fp8_class, *arguments), *rest


@functools.cache
def _freed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of this class that have freed weights."""
    names = {
        "_fp8_class": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (FreedModule, kind), {**names, "forward": _compiled_only(kind.forward)})


def _compiled_only(forward: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Return a method that raises where freed weights would be read by Python. module: whose forward it is already."""

    @functools.wraps(forward)
    def compiled_only(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_eager(args[0] if module is None else module)
        return forward(*args, **kwargs)

    made = cast("FunctionType", compiled_only)
    made.__code__ = made.__code__.replace(co_name=made.__name__)  # of its own: torch counts kinds of calls by code
    return made


def guard(module: nn.Module) -> None:
    """Let a module refuse from now on what would find NaN in its freed weights, or in those of modules below."""
    if isinstance(module, FreedModule):
        return
    module.register_state_dict_pre_hook(_refuse_files)
    module.register_load_state_dict_pre_hook(_refuse_files)
    own = vars(module).get("forward")  # as libraries set it that hook calls
    module.__class__ = _freed(type(module))
    if own is not None:
        module.forward = _compiled_only(own, module)


def refuse(module: nn.Module, name: str, what: str) -> None:
    """Raise: a weight of a module was freed, and cannot be what is said."""
    raise FreedWeightError(f"{type(module).__name__}: {name} was freed (fp8compile.free_weights), and cannot be {what}")


def refuse_freed(module: nn.Module, what: str) -> None:
    """Raise if a weight of a module, or of one below, was freed."""
    for name, parameter in module.named_parameters():
        if frozen_weights.is_freed(parameter):
            refuse(module, name, what)


def _refuse_files(module: nn.Module, *_: Any) -> None:
    refuse_freed(module, "saved or loaded: save before that, or load into a new model and freeze that")


def _refuse_eager(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and frozen_weights.is_freed(parameter):
            raise FreedWeightError(
                f"{type(module).__name__}: {name} was freed (fp8compile.free_weights), and this call is not compiled: "
                "it is made outside of the model that was frozen, or torch gave it up after "
                "torch._dynamo.config.recompile_limit kinds of calls"
            )


for _function in (_refuse_eager, frozen_weights.is_freed):
    skip_code(_function.__code__)
