"""Option `adaptive`: the settings of the automatic mode (`fp8compile/adaptive/adaptive_graph.py`, `docs/adaptive.md`).

options={"adaptive": "auto"}                       the settings below
options={"adaptive": {"bf16_steps": 100, …}}       with some of them changed
options={"recipe": "auto"}                         those of a recipe that is chosen while it trains: with a budget
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fp8compile.adaptive.ranks import is_setting
from fp8compile.errors import OptionError, shown, unknown_name

BUDGET = 0.02  # of recipe "auto"


@dataclass(frozen=True)
class Adaptive:
    """Settings of the automatic mode: when it looks, what it demands, and how often it may change a graph.

    Steps are executions of a training graph.

    bf16_steps: the first so many steps run in BF16.
    every: steps between two looks; the first ones, and those after a change, come after 1, 3, 7, … steps.
    minimum: dB of SQNR that each cast must keep.
    even: dB that it must keep with every row, and every column, counting the same
    (`fp8compile/plan/cast_statistics.py`).
    margin: dB more that a cheaper cast must have to be returned to.
    patience: looks in a row at which it must have them.
    edges: dB more that the first and the last layer must keep, and products of two activations (SwiGLU).
    recompiles: how often a graph may be compiled again, each time with changes of one or more matmuls at once, the last
    time only of what loses too much; then it is left as it is.
    budget: share of the time of all matmuls that casts may cost which add less noise (0.02: two percent); 0: casts
    change where too much is lost, and nowhere else.
    spike: a loss so many standard deviations above the mean of the last 32 is a spike; 0 looks at no loss.
    spike_steps: steps in BF16 after a spike, twice as many after each further one.
    ranks: "world" or a process group: these ranks, which run the same graphs equally often, decide together, by the
    measurements of all; None: each decides by itself.
    """

    bf16_steps: int = 0
    every: int = 100
    minimum: float = 20.0
    even: float = 10.0
    margin: float = 3.0
    patience: int = 3
    edges: float = 3.0
    recompiles: int = 8
    budget: float = 0.0
    spike: float = 6.0
    spike_steps: int = 16
    ranks: Any = None

    def __post_init__(self) -> None:
        if not is_setting(self.ranks):
            raise OptionError(f'adaptive: ranks is "world", a process group or None, not {shown(self.ranks)}')
        for f in fields(self):
            if f.name != "ranks":
                _check(f.name, getattr(self, f.name), type(f.default))

    @staticmethod
    def parse(value: Any) -> Adaptive | None:
        """Return settings from "auto", a mapping of them, an `Adaptive`, or None (off). Raises `OptionError`."""
        if value is None or isinstance(value, Adaptive):
            return value
        if isinstance(value, str) and value == "auto":
            return Adaptive()
        if not isinstance(value, Mapping):
            raise OptionError(f'it is "auto" or a mapping of its settings, not {shown(value)}')
        names = [f.name for f in fields(Adaptive)]
        for name in value:
            if name not in names:
                raise unknown_name("setting of the automatic mode", name, names)
        return Adaptive(**value)


def _check(name: str, value: Any, kind: type) -> None:
    least = 1 if name in ("every", "patience", "spike_steps") else 0
    wanted = "a whole number" if kind is int else "a number" if name in ("spike", "budget") else "a number of dB"
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        raise OptionError(f"adaptive: {name} is {wanted} of at least {least}, not {shown(value)}")
