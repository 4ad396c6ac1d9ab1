"""What the kinds of steps write with: lines of `__init__` and of `forward`, and the registry of kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .spec import Params, Spec, Step


@dataclass(frozen=True)
class Value:
    """A tensor of the pool: the name of its variable, and its last size."""

    name: str
    width: int


@dataclass
class Writer:
    """The source of a model while it is written."""

    spec: Spec
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # name -> an expression that makes it
    reused: list[tuple[str, int, int]] = field(default_factory=list)  # linear layers so far: name, inputs, outputs
    number: int = 0  # of the step that is being written
    runs_twice: bool = False  # that step, in backward again

    def module(self, made: str, part: str = "") -> str:
        """Write `self.layerN… = made`; its name."""
        name = f"self.layer{self.number}{part}"
        self.init.append(f"{name} = {made}")
        return name

    def linear(self, k: int, n: int, bias: bool = True, part: str = "") -> str:
        """A linear layer that later steps may use again."""
        name = self.module(f"nn.Linear({k}, {n}, bias={bias})", part)
        self.reused.append((name, k, n))
        return name

    def parameter(self, *shape: int, part: str = "", scale: float = 0.1) -> str:
        """A parameter of normal numbers."""
        return self.module(f"nn.Parameter({scale} * torch.randn({', '.join(map(str, shape))}))", part)

    def line(self, text: str) -> None:
        """Write a line of `forward`."""
        self.body.append(text)

    def given(self, name: str, made: str) -> str:
        """An input of the model, made by the expression `made` with the generator `g`."""
        self.inputs[name] = made
        return name


Write = Callable[[Writer, Params, list[Value]], tuple[str, int]]  # -> the step's expression, and its width
Draw = Callable[[random.Random, Spec], Params]


@dataclass(frozen=True)
class Kind:
    """A kind of step. arity: how many tensors it reads; sequence: only where tensors are [batch, length, width]."""

    write: Write
    draw: Draw
    arity: int = 1
    sequence: bool = False
    weight: float = 1.0


KINDS: dict[str, Kind] = {}


def kind(
    draw: Draw | None = None, *, arity: int = 1, sequence: bool = False, weight: float = 1.0
) -> Callable[[Write], Write]:
    """Enter a function that writes a step under its own name. `draw` makes its parameters."""

    def enter(write: Write) -> Write:
        KINDS[write.__name__] = Kind(write, draw or (lambda r, s: {}), arity, sequence, weight)
        return write

    return enter


def write_step(w: Writer, number: int, step: Step, values: list[Value]) -> Value:
    """Write one step; the value that it makes."""
    w.number, w.runs_twice = number, step.checkpoint
    first, start = len(w.init), len(w.body)
    expression, width = KINDS[step.kind].write(w, step.params, values)
    name = f"v{number}"
    layers = [line.split(" = ")[0] for line in w.init[first:]]
    if step.frozen:
        w.init += [f"{layer}.requires_grad_(False)" for layer in layers]
    if step.checkpoint:
        inner = [f"    {line}" for line in w.body[start:]]
        names = ", ".join(dict.fromkeys(v.name for v in values))
        w.body[start:] = [f"def step{number}({names}):", *inner, f"    return {expression}"]
        expression = f"checkpoint(step{number}, {names}, use_reentrant=False)"
    w.line(f"{name} = {expression}")
    return Value(name, width)


def fitted(value: Value, width: int) -> str:
    """`value` cut or padded with zeros to `width` features."""
    return value.name if value.width == width else f"F.pad({value.name}, (0, {width - value.width}))"
