"""The spec of an optimizer's update: what happens to each parameter of a group, element by element.

    value = op(earlier values)      in FP32, rounded only when it is stored
    slot  = a tensor of a parameter (or a number, of a parameter too) that is read, written, or both

One spec serves many parameters: the tensors come with the call, `len(stored)` and `len(read)` of them a parameter.
How a slot is kept:

| kind    | tensors             | what it is |
|---|---|---|
| plain   | x                   | a parameter, a gradient, a state in its own precision |
| state   | payload, side       | a state in a format of `fp8compile/state_formats.py` |
| split   | x, low              | a BF16 parameter and the 16 bits that FP32 has more |
| scalar  | x                   | one number |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from fp8compile.kernels.codegen.spec.ranges import ranges_of
from fp8compile.kernels.codegen.spec.region import Value, reached
from fp8compile.kernels.codegen.spec.value_range import NEVER_NEGATIVE

PLAIN, STATE, SPLIT, SCALAR = "plain", "state", "split", "scalar"


@dataclass(frozen=True)
class Slot:
    """A tensor that takes part: its kind, its dtype or state format; `stored`: position of the value written to it.

    counter: whether a counter for random bits comes with it; stochastic: a BF16 parameter rounded with them.
    """

    kind: str
    type: str
    stored: int | None = None
    counter: bool = False
    stochastic: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors, in the order of the arguments."""
        first = {STATE: ("payload", "side"), SPLIT: ("x", "low")}.get(self.kind, ("x",))
        return (*first, "counter") if self.counter else first


@dataclass(frozen=True)
class Update:
    """Values, and the slots that "load" values name by position: stored slots first, then read ones, then scalars.

    skip: position of a scalar; where it is not 0 nothing is written, and no counter is advanced.
    """

    slots: tuple[Slot, ...]
    values: tuple[Value, ...]
    skip: int | None = None

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Positions of the slots that are written."""
        return tuple(i for i, s in enumerate(self.slots) if s.stored is not None)

    @cached_property
    def read(self) -> tuple[int, ...]:
        """Positions of the tensors that are only read."""
        return tuple(i for i, s in enumerate(self.slots) if s.stored is None and s.kind != SCALAR)

    @cached_property
    def scalars(self) -> tuple[int, ...]:
        """Positions of the numbers."""
        return tuple(i for i, s in enumerate(self.slots) if s.kind == SCALAR)

    def width(self, positions: tuple[int, ...]) -> int:
        """Return how many tensors the slots at `positions` have."""
        return sum(len(self.slots[i].tensors) for i in positions)

    def to_json(self) -> str:
        """Return it as text, for `from_json`; equal updates have equal texts."""
        return json.dumps(asdict(self), separators=(",", ":"))


@lru_cache(maxsize=4096)
def from_json(text: str) -> Update:
    """Return the `Update` written as `text`."""
    data = json.loads(text)
    return Update(
        tuple(Slot(**slot) for slot in data["slots"]),
        tuple(Value(v["op"], tuple(v["args"]), tuple(v["params"])) for v in data["values"]),
        data["skip"],
    )


def is_matrix(scalars: Sequence[Tensor]) -> bool:
    """Return True if the numbers of an update come as one matrix with a row a parameter."""
    return len(scalars) == 1 and scalars[0].dim() == 2


def never_negative(update: Update) -> set[int]:
    """Return the positions of values without a sign, whatever the gradients: squares, their sums, states of such.

    A state is taken to hold none if what is stored in it has none as long as it holds none.
    """
    states = {i for i in update.stored if update.slots[i].kind == STATE}
    while True:
        ranges = ranges_of(update.values, dict.fromkeys(states, NEVER_NEGATIVE))
        found = {i for i, x in enumerate(ranges) if x.unsigned}
        still = {i for i in states if update.slots[i].stored in found}
        if still == states:
            return found
        states = still


def coded_values(update: Update) -> set[int]:
    """Return the positions of values that a state in 8 bits is computed from."""
    return reached(update.values, (s.stored for s in update.slots if s.kind == STATE and s.stored is not None))
