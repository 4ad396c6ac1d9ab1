"""A random model as plain data: steps over a pool of tensors, which `source.py` writes as Python.

Every tensor of the pool has the shape [*lead, width], where lead is (batch,) or (batch, length). Each step takes
tensors of any width, so that a spec stays valid whatever is removed from it: that is what makes shrinking easy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

Params = dict[str, Any]  # numbers, names and flags of a step; what they mean, its kind knows


@dataclass(frozen=True)
class Step:
    """One step: what it does, which tensors of the pool it reads (0: the model's input), and its parameters."""

    kind: str
    inputs: tuple[int, ...] = (0,)
    params: Params = field(default_factory=dict)
    checkpoint: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class Output:
    """A tensor of the pool that the model returns, as which view of it, and the loss that reads it."""

    value: int
    view: str = "plain"
    loss: str = "square"
    upcast: bool = True


@dataclass(frozen=True)
class Spec:
    """A whole model.

    length 0: tensors are [batch, width]. start: "float", "tokens" (an embedding) or "patches" (of an image).
    precision: "bf16" parameters, FP32 ones under "autocast", or "fp32".
    """

    seed: int = 0
    batch: int = 2
    length: int = 0
    width: int = 16
    start: str = "float"
    precision: str = "bf16"
    input_grad: bool = True
    loss_inside: bool = True
    steps: tuple[Step, ...] = ()
    outputs: tuple[Output, ...] = (Output(0),)
    options: Params = field(default_factory=dict)

    @property
    def lead(self) -> tuple[int, ...]:
        """The sizes before the last one."""
        return (self.batch, self.length) if self.length else (self.batch,)

    @property
    def rows(self) -> int:
        """How many rows a matrix of all features has."""
        return self.batch * max(self.length, 1)

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Spec:
    """The spec that `to_json` wrote."""
    raw = json.loads(text)
    steps = tuple(Step(**{**s, "inputs": tuple(s["inputs"])}) for s in raw.pop("steps"))
    outputs = tuple(Output(**o) for o in raw.pop("outputs"))
    return Spec(**raw, steps=steps, outputs=outputs)
