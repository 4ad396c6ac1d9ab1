"""Kept casts: payloads and scales of frozen weights, computed once, and again when a weight was written.

    kept = KeptCasts(run, values);  kept(weights) -> payloads and scales

torch counts the writes to a tensor, but for those through `.data`. A weight that has another count, or lies elsewhere,
is cast again, into the same memory: a CUDA graph goes on reading there. What another graph has kept is shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fp8compile.cuda_capture import is_capturing
from fp8compile.errors import CaptureError
from fp8compile.passes.lower.split_weight_casts import KeptValue

_values: dict[tuple[str, tuple[int, ...]], Value] = {}  # by key and the identities of the weights


@dataclass(frozen=True)
class Writing:
    """When a weight was written last, and where it lies."""

    weight: weakref.ref[Tensor]
    count: int
    address: int

    @classmethod
    def of(cls, weight: Tensor) -> Writing:
        """Return that of now."""
        return cls(weakref.ref(weight), weight._version, weight.data_ptr())

    def is_last(self, weight: Tensor) -> bool:
        """Return True if this tensor is the weight, and has not been written since."""
        return self.weight() is weight and weight._version == self.count and weight.data_ptr() == self.address


@dataclass(frozen=True)
class Value:
    """A value that is kept, and the weights that it was computed of, as they were."""

    tensor: Tensor
    of: tuple[Writing, ...]

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Return True if it is what would be computed of these weights now."""
        return all(writing.is_last(weight) for writing, weight in zip(self.of, weights, strict=True))


@dataclass
class KeptCasts:
    """The casts of one graph. run: computes all of them, of a list of weights, which it empties; values: what they are.

    known: by the identity of the first weight, what was returned for it last: layers may share a graph.
    """

    run: Callable[[list[Tensor]], Any]
    values: Sequence[KeptValue]
    known: dict[int, tuple[tuple[Writing, ...], list[Tensor]]] = field(default_factory=dict)

    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return what is kept of these weights, computing what is missing or out of date."""
        if any(weight.is_inference() for weight in weights):  # torch does not count writes to those
            return list(self.run(list(weights)))
        writings, tensors = self.known.get(id(weights[0]), ((), []))
        if writings and all(writing.is_last(weight) for writing, weight in zip(writings, weights, strict=True)):
            return tensors
        return self._renewed(weights)

    def _renewed(self, weights: Sequence[Tensor]) -> list[Tensor]:
        writings = tuple(map(Writing.of, weights))
        read = [[weights[i] for i in value.weights] for value in self.values]
        keys = [(value.key, tuple(map(id, own))) for value, own in zip(self.values, read, strict=True)]
        found = [_values.get(key) for key in keys]
        if not all(x is not None and x.holds(own) for x, own in zip(found, read, strict=True)):
            if is_capturing():
                raise CaptureError("a frozen weight has not been cast yet: run the model once before it is captured")
            new = self.run(list(weights))
            for key, old, tensor, value in zip(keys, found, new, self.values, strict=True):
                _keep(key, old, tensor, tuple(writings[i] for i in value.weights))
        tensors = [_values[key].tensor for key in keys]
        first = id(weights[0])
        if first not in self.known:
            weakref.finalize(weights[0], _forget, weakref.ref(self), first)
        self.known[first] = writings, tensors
        return tensors


def _forget(casts: weakref.ref[KeptCasts], weight: int) -> None:
    """Forget what was returned for a weight that is no more; the graph may have gone before it."""
    of_graph = casts()
    if of_graph is not None:
        of_graph.known.pop(weight, None)


def _keep(key: tuple[str, tuple[int, ...]], old: Value | None, new: Tensor, of: tuple[Writing, ...]) -> None:
    """Keep a value, in the memory of the one before it; until one of its weights is no more."""
    same = old is not None and all(x.weight() is y.weight() for x, y in zip(old.of, of, strict=True))
    if old is not None and same and _is_alike(old.tensor, new):
        old.tensor.copy_(new)
        _values[key] = Value(old.tensor, of)
        return
    _values[key] = Value(new, of)
    for writing in of:
        weakref.finalize(writing.weight(), _values.pop, key, None)


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
