"""Kept casts: payloads and scales of weights, computed once, and again when a weight was written.

    kept = KeptCasts(run, values);  kept(weights) -> payloads and scales

torch counts the writes to a tensor, but for those through `.data`. A weight that has another count, or lies elsewhere
or otherwise, is cast again. What another graph has kept is shared.

While a model trains, what is written uncounted is noticed by the gradients: a weight is cast again unless its gradient
was added to since the last forward, once at most. One without a gradient begins a step, and one that was zeroed or
clipped belongs to a step that has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing, keep
from fp8compile.errors import CaptureError, FreedWeightError
from fp8compile.passes.lower.split_weight_casts import KeptValue
from fp8compile.weight_uses import is_freed, is_unwritten, name_of, note_casts, stand_ins

Key = tuple[str, tuple[int, ...]]  # how a value is computed, and the identities of the weights


@dataclass(frozen=True)
class WeightState:
    """A weight as it was when it was cast: how often it had been written, its address and its layout."""

    weight: weakref.ref[Tensor]
    writes: int
    address: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, weight: Tensor) -> WeightState:
        """Return the state of a weight now."""
        return cls(weakref.ref(weight), weight._version, weight.data_ptr(), _layout(weight))

    def is_that_of(self, x: Tensor) -> bool:
        """Return True if `x` is the weight, and is as it was, or was freed since and not written."""
        if self.weight() is x and is_freed(x):
            return is_unwritten(x)
        lies_there = self.weight() is x and x._version == self.writes and x.data_ptr() == self.address
        return lies_there and _layout(x) == self.layout


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


@dataclass(eq=False)
class Value:
    """A payload or scale that is kept. of: the weights that it was computed of; graphs: that read it.

    tensor: None when one of the weights is gone, and while it is computed again.
    """

    tensor: Tensor | None
    of: tuple[WeightState, ...]
    graphs: weakref.WeakSet[KeptCasts] = field(default_factory=weakref.WeakSet)

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """Return True if it is what would be computed of these weights now."""
        if self.tensor is None:
            return False
        return all(state.is_that_of(weight) for state, weight in zip(self.of, weights, strict=True))

    @property
    def is_of_freed(self) -> bool:
        """True if one of the weights was freed."""
        weights = [state.weight() for state in self.of]
        return any(weight is not None and is_freed(weight) for weight in weights)

    def take(self, new: Tensor, of: tuple[WeightState, ...]) -> None:
        """Replace the tensor by one that was computed anew: in its own memory, if that can be."""
        if self.tensor is not None and self.tensor.device == new.device and _layout(self.tensor) == _layout(new):
            self.tensor.copy_(new)
        else:
            self.tensor = new
        self.of = of


@dataclass
class Values:
    """All values that are kept, as long as their weights live. finalizers: one for each weight, by its identity.

    unchanged: what was found since a value was last computed or freed. gradients: how often the gradient of each weight
    had been written at the last forward, -1 if there was none.
    """

    by_key: dict[Key, Value] = field(default_factory=dict)
    finalizers: dict[int, weakref.finalize[Any, Any]] = field(default_factory=dict)
    unchanged: set[Unchanged] = field(default_factory=set)
    gradients: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all but what cannot be computed again, as a weight was freed."""
        self.unchanged.clear()
        self.gradients.clear()
        self.by_key = {key: value for key, value in self.by_key.items() if value.is_of_freed}
        remaining = {weight for _, weights in self.by_key for weight in weights}
        for weight in set(self.finalizers) - remaining:
            self.finalizers.pop(weight).detach()

    def free(self, values: Iterable[Value | None]) -> None:
        """Free the memory of values that are to be computed again."""
        self.unchanged.clear()
        for value in values:
            if value is not None:
                value.tensor = None

    def free_unread(self, keys: Iterable[Key]) -> None:
        """Free values that no graph reads any more, but for those of weights that were freed."""
        self.unchanged.clear()
        for key in keys:
            value = self.by_key.get(key)
            if value is not None and not list(value.graphs) and not value.is_of_freed:  # dead ones may count still
                del self.by_key[key]

    def keep(self, key: Key, new: Tensor, of: tuple[WeightState, ...], weights: Sequence[Tensor]) -> None:
        """Keep a value that was computed of these weights."""
        self.unchanged.clear()
        self.by_key.setdefault(key, Value(None, ())).take(new, of)
        for weight in weights:
            if id(weight) not in self.finalizers:
                self.finalizers[id(weight)] = weakref.finalize(weight, self._free, id(weight))

    def begin_steps(self, weights: Sequence[Tensor]) -> set[int]:
        """Return the identities of weights whose gradients were not just added to since the last forward."""
        found = {id(w): -1 if w.grad is None else w.grad._version for w in weights if w.requires_grad}
        before = self.gradients.get
        begun = {weight for weight, writes in found.items() if not 0 <= writes <= before(weight, writes) + 1}
        self.gradients.update(found)
        return begun

    def _free(self, weight: int) -> None:
        """Free what was computed of a weight that is no more."""
        self.unchanged.clear()
        self.finalizers.pop(weight, None)
        self.gradients.pop(weight, None)
        for key in tuple(self.by_key):  # to which another thread may add
            if weight in key[1] and (value := self.by_key.pop(key, None)) is not None:
                value.tensor = None


_values = Values()


@dataclass(eq=False)
class Unchanged:
    """Hold what was kept of some weights, and compare all of them at once with what they were.

    As long as no value was computed or freed since, the weights live, and their values are those of this graph. Dtypes
    are not compared: Dynamo's guards have chosen the graph by them. By strides they have not on torch 2.11, where
    `p.data = …` gives a parameter others.
    """

    weights: list[int]  # identities
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    writes: list[int]
    addresses: list[int]
    values: list[Value]

    @classmethod
    def of(cls, weights: Sequence[Tensor], values: list[Value]) -> Unchanged:
        """Return what is true now."""
        writes, addresses = [w._version for w in weights], [w.data_ptr() for w in weights]
        shapes, strides = [w.shape for w in weights], [w.stride() for w in weights]
        return cls(list(map(id, weights)), shapes, strides, writes, addresses, values)

    def holds_for(self, weights: Sequence[Tensor]) -> bool:
        """Return True if it was made of these weights, and nothing has changed."""
        return (
            self in _values.unchanged
            and self.weights == list(map(id, weights))
            and self.writes == [w._version for w in weights]
            and self.addresses == [w.data_ptr() for w in weights]
            and self.shapes == [w.shape for w in weights]
            and self.strides == [w.stride() for w in weights]
        )


@dataclass(eq=False)
class KeptCasts:
    """The casts of one graph. run: computes all of them, of a list of weights, which it empties; values: what they are.

    trains: it is the graph of a forward half. in_place: what is computed again takes the same memory, where a CUDA
    graph goes on reading; else what was kept is freed first. known: by the identity of the first weight, what was
    returned for it last: layers may share a graph.
    """

    run: Callable[[list[Tensor]], Any]
    values: Sequence[KeptValue]
    trains: bool = False
    in_place: bool = True
    known: dict[int, Unchanged] = field(default_factory=dict)

    def __call__(self, weights: Sequence[Tensor]) -> list[Any]:
        """Return what is kept of these weights, computing what is missing or out of date."""
        known = self.known.get(id(weights[0]))
        begun = _values.begin_steps(weights) if self.trains else set[int]()
        if begun or known is None or not known.holds_for(weights):
            if any(weight.is_inference() and not is_freed(weight) for weight in weights):
                return self._computed_now(weights)  # torch does not count writes to those
            if is_capturing() and (not self.in_place or any(weight.requires_grad for weight in weights)):
                return self._computed_now(weights)  # a replay writes weights, and reads what it has cast itself
            known = self._renewed(weights, begun)
        tensors: list[Any] = [value.tensor for value in known.values]
        keep(*tensors)
        return tensors

    def _found(self, weights: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Key], list[Value | None]]:
        """Return of each value the weights that it is computed of, its key, and what is kept."""
        read = [[weights[i] for i in value.weights] for value in self.values]
        keys = [(value.key, tuple(map(id, own))) for value, own in zip(self.values, read, strict=True)]
        return read, keys, [_values.by_key.get(key) for key in keys]

    def _computed_now(self, weights: Sequence[Tensor]) -> list[Any]:
        """Return values computed now, which are not kept; those of freed weights as they were kept."""
        read, _, found = self._found(weights)
        tensors = list(self.run(stand_ins(weights)))
        for i, (own, x) in enumerate(zip(read, found, strict=True)):
            if any(map(is_freed, own)):
                if x is None or not x.is_current(own):
                    _refuse_freed(own)
                else:
                    tensors[i] = x.tensor
                    keep(tensors[i])
        return tensors

    def _renewed(self, weights: Sequence[Tensor], begun: set[int]) -> Unchanged:
        """Return what is kept, with casts of weights in `begun` computed again in any case."""
        states = tuple(map(WeightState.of, weights))
        read, keys, found = self._found(weights)
        stale = {
            i for i, x in enumerate(found) if x is None or not begun.isdisjoint(keys[i][1]) or not x.is_current(read[i])
        }
        if stale:
            if is_capturing():
                raise CaptureError("a frozen weight has not been cast yet: run the model once before it is captured")
            _refuse_freed([weight for i in sorted(stale) for weight in read[i]])
            if not self.in_place:
                _values.free(found[i] for i in stale)
            with torch.inference_mode(False), torch.no_grad():  # or nobody could write into them outside of that mode
                for i, tensor in enumerate(self.run(stand_ins(weights))):
                    if i in stale:  # others may be computed of zeros here
                        _values.keep(keys[i], tensor, tuple(states[n] for n in self.values[i].weights), read[i])
        note_casts(weight for weight in weights if not is_freed(weight))
        known = Unchanged.of(weights, [_values.by_key[key] for key in keys])
        if new := [key for key in keys if self not in _values.by_key[key].graphs]:
            for key in new:
                _values.by_key[key].graphs.add(self)
            weakref.finalize(self, _values.free_unread, new)
        _values.unchanged.add(known)
        self.known = {**{k: v for k, v in self.known.items() if v in _values.unchanged}, id(weights[0]): known}
        return known


def _refuse_freed(weights: Iterable[Tensor]) -> None:
    """Raise if a value is to be computed of a weight whose memory was freed."""
    names = list(dict.fromkeys(name_of(weight) for weight in weights if is_freed(weight)))
    if names:
        raise FreedWeightError(
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: this call casts what was freed, alone or with a "
            "weight that was written since. Run every kind of call (prompt, token, batch size) once before "
            "fp8compile.free_weights, and change no weight that is cast with a freed one afterwards"
        )
