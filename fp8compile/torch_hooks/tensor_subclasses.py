"""How tensor subclasses are made that torch.compile sees through. Private API of torch, used here only.

The same as for torch's own ones (DTensor, …): there is no public way to make a tensor that has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # torch has no public name for it

aten = torch.ops.aten
Subclass = TypeVar("Subclass", bound=Tensor)

no_torch_function: Any = torch._C._disabled_torch_function_impl  # as `__torch_function__`: `__torch_dispatch__` alone
# Operators whose result is the same tensor, part by part.
AS_THEY_ARE = {aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default}

__all__ = [
    "AS_THEY_ARE",
    "has_values_to_come",
    "no_torch_function",
    "refuse_memory",
    "tree_map",
    "without_memory",
    "written_arguments",
]


def without_memory(cls: type[Subclass], like: Tensor, **more: Any) -> Subclass:
    """Return a tensor of class `cls` with shape, strides and device of `like`. more: dtype, storage offset, pinning."""
    given: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": like.device, **more}
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, **given)  # type: ignore[attr-defined]


def refuse_memory(x: Subclass) -> Subclass:
    """Have torch raise where code in C++ asks for the memory behind `x`; return `x`.

    Such code would read address 0. Most of it is never reached, but `__torch_dispatch__` does not see tensors in lists
    of lists, which the collectives scatter and gather take.
    """
    torch._C._set_throw_on_mutable_data_ptr(x)  # as torch's fake tensors do
    return x


def has_values_to_come(x: Tensor) -> bool:
    """Return True if `x` is being loaded from a file in torch's old format, whose values are read after all else."""
    return getattr(x.untyped_storage(), "_torch_load_uninitialized", False)


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments that the operator `func` writes to; of lists each entry."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]
