"""The operators of optimizer graphs, registered once, at import.

    fp8::load_state(payload, side, format, dtype)               -> the state, in `dtype`
    fp8::store_state(x, counter, low, format, parameter)        -> (payload, side)
    fp8::unscale(gradient, inverse, overflow)                   -> gradient · inverse, in the gradient's dtype
    fp8::update_parameters(stored, read, scalars, spec)         -> nothing; writes what is `stored`
    fp8::stack(numbers)                                         -> one vector of them
    fp8::add_in_place(numbers, by, unless)                      -> nothing; adds `by` to each, if `unless` is 0

The first two are what an `FP8State` does when an optimizer reads it or writes to it. `counter`, `low` and `parameter`
change nothing of what is stored but its random bits: they tell the passes how the parameter is to be rounded
(`fp8compile/optimizer/state_recipe.py`). `unscale` is GradScaler's arithmetic; `overflow` changes nothing of it: it
tells the passes which number says that the step is to be skipped (`passes/optimizer/skip_overflow.py`). The fourth is
what the passes make of the updates of many parameters: one launch (`kernels/optimizer/update_spec.py`); `scalars` are
0-d tensors, parameter by parameter, or one matrix with a row a parameter. The last two are one launch each, for which
Inductor would write a kernel a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.kernels.optimizer import state_transfer, update
from fp8compile.state_formats import parse_state_format


def _load(payload: Tensor, side: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return state_transfer.decode(payload, side, format, dtype)


def _load_on_gpu(payload: Tensor, side: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return state_transfer.decode_on_gpu(payload, side, format, dtype)


def _fake_load(payload: Tensor, side: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return payload.new_empty(payload.shape, dtype=dtype)


def _store(x: Tensor, counter: Tensor | None, low: Tensor | None, format: str, parameter: str) -> tuple[Tensor, Tensor]:
    return state_transfer.encode(x, format, counter)


def _store_on_gpu(
    x: Tensor, counter: Tensor | None, low: Tensor | None, format: str, parameter: str
) -> tuple[Tensor, Tensor]:
    return state_transfer.encode_on_gpu(x, format, counter)


def _fake_store(
    x: Tensor, counter: Tensor | None, low: Tensor | None, format: str, parameter: str
) -> tuple[Tensor, Tensor]:
    how = parse_state_format(format)
    payload = x.new_empty(x.shape, dtype=how.payload_dtype)
    return payload, x.new_empty(how.side_shape(x.numel()), dtype=torch.float32)


def _unscale(gradient: Tensor, inverse: Tensor, overflow: Tensor) -> Tensor:
    return (gradient.float() * inverse).to(gradient.dtype)


def _fake_unscale(gradient: Tensor, inverse: Tensor, overflow: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _fake_update(stored: list[Tensor], read: list[Tensor], scalars: list[Tensor], spec: str) -> None:
    return None


def _stack(numbers: list[Tensor]) -> Tensor:
    return torch.stack(numbers)


def _add_in_place(numbers: list[Tensor], by: float, unless: Tensor | None) -> None:
    first = numbers[0]
    added = by if unless is None else ((unless == 0) * by).to(first.device, first.dtype)
    torch._foreach_add_(numbers, added)


def _fake_add(numbers: list[Tensor], by: float, unless: Tensor | None) -> None:
    return None


_library = torch.library.Library("fp8", "FRAGMENT")  # lives as long as the process
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
_library.define("load_state(Tensor payload, Tensor side, str format, ScalarType dtype) -> Tensor", tags=_TAGS)
_library.define(
    "store_state(Tensor x, Tensor? counter, Tensor? low, str format, str parameter) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define("unscale(Tensor gradient, Tensor inverse, Tensor overflow) -> Tensor", tags=_TAGS[:1])
_library.define(
    "update_parameters(Tensor(a!)[] stored, Tensor[] read, Tensor[] scalars, str spec) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define("stack(Tensor[] numbers) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "add_in_place(Tensor(a!)[] numbers, Scalar by, Tensor? unless) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("load_state", _load, "CompositeExplicitAutograd")
_library.impl("store_state", _store, "CompositeExplicitAutograd")
_library.impl("load_state", _load_on_gpu, "CUDA")
_library.impl("store_state", _store_on_gpu, "CUDA")
_library.impl("unscale", _unscale, "CompositeExplicitAutograd")
_library.impl("update_parameters", update.run, "CompositeExplicitAutograd")
_library.impl("update_parameters", update.run_on_gpu, "CUDA")
_library.impl("stack", _stack, "CompositeExplicitAutograd")
_library.impl("add_in_place", _add_in_place, "CompositeExplicitAutograd")
_FAKES = {
    "load_state": _fake_load,
    "store_state": _fake_store,
    "update_parameters": _fake_update,
    "unscale": _fake_unscale,
    "stack": _stack,
    "add_in_place": _fake_add,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"fp8::{_name}", _fake, lib=_library)

load_state = torch.ops.fp8.load_state.default
store_state = torch.ops.fp8.store_state.default
unscale = torch.ops.fp8.unscale.default
update_parameters = torch.ops.fp8.update_parameters.default
stack = torch.ops.fp8.stack.default
add_in_place = torch.ops.fp8.add_in_place.default
