"""Operators that copy a state, or make room for a copy: applied to each of its parts, so that every bit is kept.

    clone, detach, .to(device), pin_memory, record_stream    each part
    empty_like, zeros_like, new_empty, new_zeros             a state with empty parts, to copy_ into
    all_gather, scatter, wait, split, pad                    each part by its rows: a row is whole groups

torch's own tools copy with these (deepcopy, stagers of torch.distributed.checkpoint, DTensor), and copy exactly
whatever answers them. What would take the memory behind a tensor is refused: a state has none of its own. So are
collectives that write to tensors, but for `scatter`, as what they write would be lost.

All else computes, with what the state stands for; and so does everything in a step that is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile.errors import StateError
from fp8compile.optimizer.state_parts import StateParts
from fp8compile.state_formats import GROUP, parse_state_format
from fp8compile.torch_hooks.tensor_subclasses import AS_THEY_ARE

aten, functional = torch.ops.aten, torch.ops._c10d_functional
LIKE = {aten.empty_like.default: torch.empty_like, aten.zeros_like.default: torch.zeros_like}
NEW = {aten.new_empty.default: torch.empty_like, aten.new_zeros.default: torch.zeros_like}
PINNING = {aten._pin_memory.default, aten.pin_memory.default}
MEMORY = {aten.set_, aten.resize_, aten.resize_as_}
WAITING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}  # the latter waits later
COLLECTIVES = ("c10d", "symm_mem")


def copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what `func` makes of a state where it only copies; NotImplemented where it computes.

    Raises `StateError` for what can neither be kept bit for bit nor is a computation.
    """
    state: Any = args[0] if args else None
    if func is aten.cat.default:
        return _joined(*args, **kwargs)
    if hasattr(state, "like"):
        for rule in (_each_part, _blank, _by_rows):
            if (result := rule(func, state, args, kwargs)) is not NotImplemented:
                return result
    if func is aten.copy_.default and not hasattr(state, "like"):
        _refuse_loss(args[1])
    if func.name() == "c10d::scatter_":
        return _scattered(func, args, kwargs)
    if func.overloadpacket in MEMORY or func.namespace in COLLECTIVES:
        raise no_memory(f"{func} is to write to it or to read it")
    return NotImplemented


def _refuse_loss(source: StateParts) -> None:
    """Raise `StateError` if a tool turns a checkpoint into plain tensors, which have no place for missing bits."""
    if source.from_file and source.low is not None:
        raise StateError(
            "an 8-bit optimizer state from a file is to become a plain tensor, and carries 16 more bits of each "
            "element of its BF16 parameter, which would be lost: load it into an optimizer that "
            "fp8compile.prepare_optimizer has prepared, or read state.dequantize()"
        )


def no_memory(what: str) -> StateError:
    """Return the error for `what` wants the memory of a state."""
    return StateError(
        f"an 8-bit optimizer state has no memory of its own, and {what}: its parts would be lost. Copy it with "
        "clone(), copy_() or torch.save, gather it with full_tensor(); fp8compile.plain_state_dict(opt) has plain "
        "tensors"
    )


def _each_part(func: Any, state: StateParts, args: Any, kwargs: Any) -> Any:
    if func in AS_THEY_ARE:
        return state.like(lambda x: func(x))
    if func.name() in WAITING:
        return state.like(lambda x: functional.wait_tensor.default(x))
    if func is aten._to_copy.default and kwargs.get("dtype", state.dtype) in (None, state.dtype):
        how = {name: kwargs[name] for name in ("device", "pin_memory", "non_blocking") if name in kwargs}
        return state.like(lambda x: aten._to_copy.default(x, **how))
    if func in PINNING:
        return state.like(lambda x: x.pin_memory())
    if func is aten.is_pinned.default:
        return all(x.is_pinned() for x in state.parts())
    if func is aten.record_stream.default:
        for x in state.parts():
            func(x, *args[1:])
        return None
    return NotImplemented


def _blank(func: Any, state: StateParts, args: Any, kwargs: Any) -> Any:
    """Return a state of the same shape and format with nothing in it, or zeros: it is made to be copied into."""
    make = LIKE.get(func) or (NEW.get(func) if list(args[1:2]) == [list(state.shape)] else None)
    if make is None or type(state.payload) is not Tensor or kwargs.get("dtype") not in (None, state.dtype):
        return NotImplemented
    how = {name: kwargs[name] for name in ("device", "pin_memory") if kwargs.get(name) is not None}
    return state.like(lambda x: make(x, **how))


def _by_rows(func: Any, state: StateParts, args: Any, kwargs: Any) -> Any:
    """Return the state with rows of other ranks below its own, with zeros below them, or cut into some states."""
    if type(state.payload) is not Tensor:
        return NotImplemented
    if func is functional.all_gather_into_tensor.default:
        return _rows_changed(state, lambda x, rows: _gathered(func, x, args, kwargs))
    if func is aten.constant_pad_nd.default and _adds_zero_rows(state, *args[1:]):
        return _rows_changed(state, lambda x, rows: torch.cat([x, x.new_zeros(args[1][-1] * rows, *x.shape[1:])]))
    if func is aten.split.Tensor and (len(args) < 3 or args[2] == 0):
        pieces: list[Any] = [state.rows(0, first, first + args[1]) for first in range(0, state.shape[0], args[1])]
        return NotImplemented if any(x is None for x in pieces) else pieces
    if _is_no_row(func, state, args):
        return state.like(lambda x: x.clone() if x is state.counter else x[:0].clone())
    return NotImplemented


def _is_no_row(func: Any, state: StateParts, args: Any) -> bool:
    """Return True if DTensor makes a shard for a rank that no row is left for."""
    return func in NEW and len(args) > 1 and list(args[1]) == [0, *state.shape[1:]]


def _adds_zero_rows(state: StateParts, pad: list[int], value: float = 0) -> bool:
    return len(pad) == 2 * state.dim() and not any(pad[:-1]) and pad[-1] >= 0 and value == 0


def _rows_changed(state: StateParts, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Return `state` with `change` applied to its parts and the rows that each has for one of the state."""
    row, exact = math.prod(state.shape[1:]), parse_state_format(state.format).is_exact
    if row % GROUP and not exact:
        return NotImplemented

    def changed(x: Tensor) -> Tensor:
        if x is state.counter or (exact and x is state.side):  # not by rows
            return x.clone()
        return change(x, row // GROUP if x is state.side else 1)

    return state.like(changed)


def _joined(states: list[Any], dim: int = 0) -> Any:
    """Return several exact states as one, as DTensor gathers columns; others are joined as what they stand for."""
    first = states[0]
    exact = all(hasattr(x, "like") and parse_state_format(x.format).is_exact for x in states)
    if not exact or type(first.payload) is not Tensor or len({x.low is None for x in states}) > 1:
        return NotImplemented

    def joined(name: str, x: Tensor) -> Tensor:
        return x.clone() if name in ("side", "counter") else torch.cat([getattr(y, name) for y in states], dim)

    names = {id(getattr(first, name)): name for name in ("payload", "side", "counter", "low")}
    return first.like(lambda x: joined(names[id(x)], x))


def _gathered(func: Any, x: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Return the rows of all ranks."""
    gathered = func(_as_bytes(x), *args[1:], **kwargs)
    return gathered if gathered.dtype == x.dtype else functional.wait_tensor.default(gathered).view(x.dtype)


def _scattered(func: Any, args: Any, kwargs: Any) -> Any:
    """Write to the state of this rank what the root has for it, part by part; return both as torch does."""
    (target,), sources, *how = args
    if not all(hasattr(x, "like") for x in (target, *(x for states in sources for x in states))):
        raise no_memory(f"{func} is to write to a tensor of another kind")
    work = None
    for n, part in enumerate(target.parts()):
        if work is not None:
            work.wait()
        given = [[_as_bytes(state.parts()[n]) for state in states] for states in sources]
        _, work = func([_as_bytes(part)], given, *how, **kwargs)
    return [target], work


def _as_bytes(x: Tensor) -> Tensor:
    """Return int16 as bytes: neither NCCL nor gloo knows it."""
    return x.view(torch.uint8) if x.dtype == torch.int16 else x
