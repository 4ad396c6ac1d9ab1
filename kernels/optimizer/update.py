"""The meaning of an update spec, in plain torch, which a CPU runs; a GPU runs a generated kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.optimizer.update_spec import SPLIT, STATE, Slot, Update, from_json, is_matrix
from fp8compile.kernels.reference import state_reference as states

Tensors = dict[str, Tensor]  # of one slot, by name


def run(stored: Sequence[Tensor], read: Sequence[Tensor], scalars: Sequence[Tensor], spec: str) -> None:
    """Update every parameter in place, and advance the counters of random bits."""
    update = from_json(spec)
    for slots in parameters(update, stored, read, scalars):
        if update.skip is None or slots[update.skip]["x"] == 0:
            _run_one(update, slots)
    advance(update, stored, scalars)


def run_on_gpu(stored: Sequence[Tensor], read: Sequence[Tensor], scalars: Sequence[Tensor], spec: str) -> None:
    """Update every parameter in place by one launch, and advance the counters of random bits."""
    from fp8compile.kernels.optimizer import update_launch  # its generator needs no Triton, its launch does

    update_launch.launch(spec, stored, read, scalars)
    advance(from_json(spec), stored, scalars)


def advance(update: Update, stored: Sequence[Tensor], scalars: Sequence[Tensor]) -> None:
    """Count one step for every counter, unless it is skipped."""
    count(update, counters_of(update, stored), scalars)


def counters_of(update: Update, stored: Sequence[Tensor]) -> list[Tensor]:
    """Return the counters among the tensors of all parameters; a parameter and its state may share one."""
    names = [name for i in update.stored for name in update.slots[i].tensors]
    found = [x for i, name in enumerate(names) if name == "counter" for x in stored[i :: len(names)]]
    return list({x.data_ptr(): x for x in found}.values())


def count(update: Update, counters: list[Tensor], scalars: Sequence[Tensor]) -> None:
    """Count one step, unless the numbers say that it is skipped."""
    if not counters:
        return
    one: int | Tensor = 1
    if update.skip is not None:
        numbers = scalars[0][0] if is_matrix(scalars) else scalars  # of the first parameter
        overflow = numbers[update.scalars.index(update.skip)]
        one = (overflow == 0).to(counters[0].device, counters[0].dtype)
    torch._foreach_add_(counters, one)


def overflow_in(update: Update, matrix: Tensor | None) -> Tensor | None:
    """Return the number that is not 0 where a step is skipped, of a matrix with a row a parameter; None without one."""
    if update.skip is None or matrix is None:
        return None
    return matrix[0, update.scalars.index(update.skip)]


def parameters(
    update: Update, stored: Sequence[Tensor], read: Sequence[Tensor], scalars: Sequence[Tensor]
) -> Iterator[dict[int, Tensors]]:
    """Yield the slots of each parameter, out of the flat lists that the operator takes."""
    if is_matrix(scalars):
        scalars = scalars[0].flatten().unbind()
    lists = [(iter(stored), update.stored), (iter(read), update.read), (iter(scalars), update.scalars)]
    count = len(stored) // update.width(update.stored)
    for _ in range(count):
        yield {i: {name: next(xs) for name in update.slots[i].tensors} for xs, positions in lists for i in positions}


def _run_one(update: Update, slots: dict[int, Tensors]) -> None:
    values: list[Any] = []
    for value in update.values:
        if value.op == "constant":
            (x,) = value.params
            values.append(torch.tensor(x, dtype=torch.bool if isinstance(x, bool) else torch.float32, device="cpu"))
        elif value.op == "load":
            values.append(_load(update.slots[value.params[0]], slots[value.params[0]]))
        else:
            values.append(OPERATIONS[value.op].torch(*(values[a] for a in value.args), *value.params))
    for i in update.stored:
        slot = update.slots[i]
        assert slot.stored is not None
        _store(slot, slots[i], values[slot.stored])


def _load(slot: Slot, tensors: Tensors) -> Tensor:
    if slot.kind == STATE:
        return states.decode(tensors["payload"], tensors["side"], slot.type)
    if slot.kind == SPLIT:
        return states.join(tensors["x"], tensors["low"])
    x = tensors["x"]
    return x if x.dtype == torch.bool else x.float()


def _store(slot: Slot, tensors: Tensors, x: Tensor) -> None:
    if slot.kind == STATE:
        shape = tensors["payload"].shape
        payload, side = states.encode(x.expand(shape), slot.type, tensors.get("counter"))
        tensors["payload"].copy_(payload)
        tensors["side"].copy_(side)
    elif slot.kind == SPLIT:
        high, low = states.split(x)
        tensors["x"].copy_(high)
        tensors["low"].copy_(low)
    elif slot.stochastic:
        tensors["x"].copy_(states.round_stochastically(x, tensors["counter"]))
    else:
        tensors["x"].copy_(x)
