"""Kept casts: payloads and scales of weights, computed once, and again when a weight was written.

    kept = KeptCasts(run, values);  kept(weights) -> payloads and scales

torch counts the writes to a tensor, but for those through `.data` and of fused optimizers; the steps of optimizers are
counted here (`weight_uses.py`). A weight that has another count, or lies elsewhere or otherwise, is cast again. What
another graph has kept is shared. A weight that is trained is cast in every call until an optimizer has stepped: who
updates weights by hand may do so in ways that nobody counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.cuda_capture import is_capturing, keep
from fp8compile.errors import CaptureError, FreedWeightError
from fp8compile.passes.lower.split_weight_casts import KeptValue
from fp8compile.weight_uses import (
    is_freed,
    is_stepped,
    is_unwritten,
    name_of,
    note_casts,
    stand_ins,
    writes_of,
)

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
        return cls(weakref.ref(weight), writes_of(weight), weight.data_ptr(), _layout(weight))

    def is_that_of(self, x: Tensor) -> bool:
        """Return True if `x` is the weight, and is as it was, or was freed since and not written."""
        if self.weight() is x and is_freed(x):
            return is_unwritten(x)
        lies_there = self.weight() is x and writes_of(x) == self.writes and x.data_ptr() == self.address
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

    def take(self, new: Tensor, of: tuple[WeightState, ...], in_place: bool) -> None:
        """Replace the tensor by one that was computed anew; in_place: in its own memory, if that can be."""
        old = self.tensor
        if in_place and old is not None and old.device == new.device and _layout(old) == _layout(new):
            old.copy_(new)
        else:
            self.tensor = new
        self.of = of


@dataclass
class Values:
    """All values that are kept, as long as their weights live. finalizers: one for each weight, by its identity.

    unchanged: what was found since a value was last computed or freed.
    """

    by_key: dict[Key, Value] = field(default_factory=dict)
    finalizers: dict[int, weakref.finalize[Any, Any]] = field(default_factory=dict)
    unchanged: set[Unchanged] = field(default_factory=set)

    def clear(self) -> None:
        """Forget all but what cannot be computed again, as a weight was freed."""
        self.unchanged.clear()
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

    def free_unread(self) -> None:
        """Free values that no graph reads any more, but for those of weights that were freed."""
        self.unchanged.clear()
        for key, value in tuple(self.by_key.items()):  # to which another thread may add
            if not list(value.graphs) and not value.is_of_freed:  # dead ones may count still
                self.by_key.pop(key, None)

    def keep(
        self, key: Key, new: Tensor, of: tuple[WeightState, ...], weights: Sequence[Tensor], in_place: bool
    ) -> None:
        """Keep a value that was computed of these weights; in_place: in the memory that it has, if that can be."""
        self.unchanged.clear()
        self.by_key.setdefault(key, Value(None, ())).take(new, of, in_place)
        for weight in weights:
            if id(weight) not in self.finalizers:
                self.finalizers[id(weight)] = weakref.finalize(weight, self._free, id(weight))

    def _free(self, weight: int) -> None:
        """Free what was computed of a weight that is no more."""
        self.unchanged.clear()
        self.finalizers.pop(weight, None)
        for key in tuple(self.by_key):  # to which another thread may add
            if weight in key[1] and (value := self.by_key.pop(key, None)) is not None:
                value.tensor = None


_values = Values()
_computing = threading.RLock()  # held by the thread that computes values


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
        writes, addresses = list(map(writes_of, weights)), [w.data_ptr() for w in weights]
        shapes, strides = [w.shape for w in weights], [w.stride() for w in weights]
        return cls(list(map(id, weights)), shapes, strides, writes, addresses, values)

    def holds_for(self, weights: Sequence[Tensor]) -> bool:
        """Return True if it was made of these weights, and nothing has changed."""
        return (
            self in _values.unchanged
            and self.weights == list(map(id, weights))
            and self.writes == list(map(writes_of, weights))
            and self.addresses == [w.data_ptr() for w in weights]
            and self.shapes == [w.shape for w in weights]
            and self.strides == [w.stride() for w in weights]
        )


@dataclass(eq=False)
class KeptCasts:
    """The casts of one graph. run: computes all of them, of a list of weights, which it empties; values: what they are.

    in_place: what is computed again takes the same memory, where a CUDA graph goes on reading; else what was kept is
    freed first. known: by the identity of the first weight, what was returned for it last: layers may share a graph.
    """

    run: Callable[[list[Tensor]], Any]
    values: Sequence[KeptValue]
    in_place: bool = True
    known: dict[int, Unchanged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Free what it alone reads when it is gone."""
        weakref.finalize(self, _values.free_unread)

    def __call__(self, weights: Sequence[Tensor]) -> list[Any]:
        """Return what is kept of these weights, computing what is missing or out of date."""
        known = self.known.get(id(weights[0]))
        tensors: list[Any] = [x.tensor for x in known.values] if known is not None and known.holds_for(weights) else []
        if not tensors or any(x is None for x in tensors):  # which another thread computes now
            if any(weight.is_inference() and not is_freed(weight) for weight in weights):
                return self._computed_now(weights)  # torch does not count writes to those
            if is_capturing() and (not self.in_place or any(weight.requires_grad for weight in weights)):
                return self._computed_now(weights)  # a replay writes weights, and reads what it has cast itself
            with _computing:
                tensors = [value.tensor for value in self._renewed(weights)]
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

    def _renewed(self, weights: Sequence[Tensor]) -> list[Value]:
        """Return what is kept, with what is out of date computed again."""
        states = tuple(map(WeightState.of, weights))
        read, keys, found = self._found(weights)
        unsure = {id(w) for w in weights if w.requires_grad and not is_stepped(w)}
        is_unsure = [not unsure.isdisjoint(own) for _, own in keys]
        stale = {i for i, x in enumerate(found) if x is None or is_unsure[i] or not x.is_current(read[i])}
        if stale:
            if is_capturing():
                raise CaptureError("a frozen weight has not been cast yet: run the model once before it is captured")
            _refuse_freed([weight for i in sorted(stale) for weight in read[i]])
            if not self.in_place:
                _values.free(found[i] for i in stale)
            with torch.inference_mode(False), torch.no_grad():  # or nobody could write into them outside of that mode
                for i, tensor in enumerate(self.run(stand_ins(weights))):
                    if i in stale:  # others may be computed of zeros here
                        of = tuple(states[n] for n in self.values[i].weights)
                        _values.keep(keys[i], tensor, of, read[i], in_place=not is_unsure[i])
        note_casts(weight for weight in weights if not is_freed(weight))
        values = [_values.by_key[key] for key in keys]
        for value in values:
            value.graphs.add(self)
        if (old := self.known.get(id(weights[0]))) is not None:
            _values.unchanged.discard(old)
        if not unsure:
            known = Unchanged.of(weights, values)
            _values.unchanged.add(known)
            self.known = {**{k: v for k, v in self.known.items() if v in _values.unchanged}, id(weights[0]): known}
        return values


def _refuse_freed(weights: Iterable[Tensor]) -> None:
    """Raise if a value is to be computed of a weight whose memory was freed."""
    names = list(dict.fromkeys(name_of(weight) for weight in weights if is_freed(weight)))
    if names:
        raise FreedWeightError(
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: this call casts what was freed, alone or with a "
            "weight that was written since. Run every kind of call (prompt, token, batch size) once before "
            "fp8compile.free_weights, and change no weight that is cast with a freed one afterwards"
        )
