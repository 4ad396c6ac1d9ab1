"""Which optimizer states are kept in 8 bits, in which format, and how parameters are rounded.

| field | default | meaning |
|---|---|---|
| first | `"log"` | format of states that do not change slowly, as first moments (`fp8compile/state_formats.py`) |
| second | `"log/stochastic"` | format of what changes slowly: second moments and the like (`SLOW`, by name) |
| formats | `{}` | format by name of the state, before the two above |
| parameters | `"nearest"` | how a BF16 parameter is rounded: `"nearest"`, `"stochastic"`, or `"split"` (16 more bits) |
| smallest | 4096 | parameters of fewer elements keep FP32 states |

`split` keeps the 16 bits that an FP32 parameter has more: the BF16 parameter is always the FP32 one, rounded. The first
state of a parameter carries them, so an optimizer without states cannot have them.

The defaults are what measured best (`benchmarks/optimizer/states.py`): over 2000 steps of real training the mean of
v̂ / v is 0.9995, and m / √v has 2 % of the error of plain FP8. What counts as small is decided by the size of the global
parameter, so sharding changes no format.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fp8compile.errors import OptionError, inside, shown, unknown_name
from fp8compile.optimizer.new_states import is_one_number, number_of
from fp8compile.state_formats import FLOAT32, GROUP, StateFormat, parse_state_format

PARAMETERS = ("nearest", "stochastic", "split")
SLOW = ("sq", "sum", "delta", "inf", "slow")  # in the name of a state that changes by far less than a code in a step
WEIGHTS = ("ax",)  # averages of weights that begin at zero: of torch.optim.ASGD
NEAR = 0.5  # how far from its parameter, in shares of its norm, a state may be and still be taken for weights
SAMPLE = 1 << 20  # elements of a state that are compared with its parameter
VECTOR = 1 << 20  # a vector of fewer elements is a norm weight or a bias; of more, something flattened
ROUNDED = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Decision:
    """The format of one state, and the reason; `format` None: it stays the tensor it is."""

    format: StateFormat | None
    reason: str


@dataclass(frozen=True)
class StateRecipe:
    """The choices in the module's table."""

    first: StateFormat = field(default_factory=lambda: parse_state_format("log"))
    second: StateFormat = field(default_factory=lambda: parse_state_format("log/stochastic"))
    formats: tuple[tuple[str, StateFormat], ...] = ()
    parameters: str = "nearest"
    smallest: int = 4096

    @property
    def keeps_all_plain(self) -> bool:
        """True if no state is kept in fewer bits, and no parameter rounded otherwise than torch does."""
        formats = (self.first, self.second, *(how for _, how in self.formats))
        return self.parameters == "nearest" and all(how == FLOAT32 for how in formats)

    @staticmethod
    def parse(value: StateRecipe | str | Mapping[str, Any] | None) -> StateRecipe:
        """Return a recipe from an object, a format for all states, a mapping of fields, or None (the default)."""
        if isinstance(value, StateRecipe):
            return value
        if isinstance(value, str):
            return StateRecipe(parse_state_format(value), parse_state_format(value))
        if value is not None and not isinstance(value, Mapping):
            raise OptionError(f"a state recipe is a format's name, a StateRecipe or a mapping, not {shown(value)}")
        given: dict[str, Any] = {}
        for name, entry in dict(value or {}).items():
            if name not in (names := [f.name for f in fields(StateRecipe)]):
                raise unknown_name("field of a state recipe", name, names)
            with inside(name):
                given[name] = _field(name, entry)
        return StateRecipe(**given)

    def __post_init__(self) -> None:
        named = [("first", self.first), ("second", self.second), *self.formats]
        for name, given in named:
            if not isinstance(given, StateFormat):
                raise OptionError(f"{name} is a StateFormat, not {shown(given)} (names: StateRecipe.parse reads them)")
        _field("parameters", self.parameters)
        _field("smallest", self.smallest)

    def decide(self, name: str, parameter: Tensor, state: Tensor) -> Decision:
        """Decide what becomes of the state `name` of `parameter`, by their global shapes and dtypes."""
        elements = parameter.numel()  # of a DTensor: of all shards
        if state.shape != parameter.shape or not state.is_floating_point():
            return Decision(None, "not one number an element")
        if state.layout is not torch.strided:
            return Decision(None, "a sparse tensor")
        if parameter.dim() == 0:  # as a count of steps is, too, which is FP32
            return Decision(FLOAT32 if state.dtype in ROUNDED else None, "a single number")
        if parameter.dtype not in (torch.float32, *ROUNDED) or state.dtype not in (torch.float32, *ROUNDED):
            return Decision(None, f"{state.dtype} state of a {parameter.dtype} parameter")
        small = ""
        if elements < self.smallest:
            small = f"small: {elements} elements, fewer than {self.smallest}"
        elif parameter.dim() < 2 and elements < VECTOR:
            small = f"a vector of {elements} elements: a norm's weight or a bias"
        small = small or _cut_by_shards(parameter)
        if small:
            needs = parameter.dtype in ROUNDED  # FP32 beside a BF16 parameter; and what rides on a state
            return Decision(FLOAT32 if needs else None, f"kept in FP32: {small}")
        chosen = dict(self.formats).get(name) or (self.second if is_slow(name) else self.first)
        return Decision(chosen, "8 bits an element")

    def rounding(self, parameter: Tensor) -> str:
        """Return how `parameter` is rounded when it is stored: a name of `PARAMETERS`."""
        return self.parameters if parameter.dtype == torch.bfloat16 else "nearest"


def _cut_by_shards(parameter: Tensor) -> str:
    """Return the reason why shards of `parameter` might cut groups; "" if no number of shards can."""
    if not isinstance(parameter, DTensor):
        return ""
    dims = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
    if any(dims):
        return f"sharded along dimension {max(dims)}, so that the number of ranks would decide about groups"
    row = parameter.numel() // max(1, parameter.shape[0])
    if row % GROUP:
        return f"rows of {row} elements, no multiple of {GROUP}: the number of ranks would decide about groups"
    return ""


def is_slow(name: str) -> bool:
    """Return True for names of second moments, and of other averages that rounding to nearest would not let change."""
    return any(word in name for word in SLOW)


def is_weight(name: str, parameter: Tensor, state: Tensor) -> bool:
    """Return True if the state `name` is a copy or an average of its parameter, as slow or averaged weights are.

    8 bits would round it by percents, and hold it where it is. Moments of gradients have nothing to do with the
    parameter. Both are the local parts of what is distributed. Looks at some elements, and waits for the device.
    """
    if name in WEIGHTS:
        return True
    if state.is_meta or parameter.is_meta or not state.numel():
        return False
    near, weight = (_sample(x.detach()).float() for x in (state, parameter))
    return bool((near - weight).norm() < NEAR * weight.norm())


def _sample(x: Tensor) -> Tensor:
    """Return some elements of `x`, in its order whatever its strides: nothing of its size is made."""
    if is_one_number(x):
        return number_of(x).reshape(1)
    step = -(-x.numel() // SAMPLE)
    if x.is_contiguous():
        return x.view(-1)[::step]
    places = torch.arange(0, x.numel(), step, device=x.device, dtype=torch.int64)
    return x[torch.unravel_index(places, x.shape)]


def salt(index: int, name: str) -> int:
    """Return a number for the random bits of the state `name` of parameter `index`, the same in every process."""
    return zlib.crc32(f"{index} {name}".encode()) % (1 << 30)


def _field(name: str, value: Any) -> Any:
    if name in ("first", "second"):
        return parse_state_format(value)
    if name == "formats":
        if not isinstance(value, Mapping):
            raise OptionError(f"formats maps names of states to formats, and is not {shown(value)}")
        if odd := [state for state in value if not isinstance(state, str) or not state]:
            raise OptionError(f"formats maps names of states (strings), not {shown(odd[0])}")
        return tuple((state, parse_state_format(how)) for state, how in value.items())
    if name == "parameters":
        if not isinstance(value, str) or value not in PARAMETERS:
            raise unknown_name("rounding of parameters", value, PARAMETERS)
        return value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(f"smallest is a number of elements, not {shown(value)}")
    return value
