"""Recipes: the numerics choices of the three matmuls of a linear, and nothing about speed.

    output[M, N]      = activation[M, K] @ weight[N, K]ᵀ
    grad_input[M, K]  = gradient[M, N]   @ weight[N, K]
    grad_weight[N, K] = gradient[M, N]ᵀ  @ activation[M, K]

Each `Role` says how its left and right operand become FP8 (a `Cast` each), or is None: that matmul stays BF16.

| recipe | output | grad_input | grad_weight |
|---|---|---|---|
| mixed (default)      | row × tensor            | tensor × tensor         | tensor × tensor |
| tensorwise           | tensor × tensor         | E5M2 tensor × tensor    | E5M2 tensor × tensor |
| rowwise              | row × row               | row × row               | row × row |
| rowwise_with_gw_hp   | row × row               | row × row               | BF16 |
| blockwise            | group(128) × block(128) | group(128) × block(128) | group(128) × group(128) |

Grouped matmuls (experts) run output and grad_input as row × row under every recipe (`passes/grouped_matmuls.py`).
A row or group always lies along the contracted dimension. In grad_weight that is the token dimension: the matmul
units allow nothing else there; what is only *saved* in FP8 never groups across tokens.
Sources: mixed is the measured choice of this project; tensorwise, rowwise and rowwise_with_gw_hp follow torchao's
float8 training (their power-of-two row scales by `power_of_two=True`); blockwise follows DeepSeek-V3 (arXiv
2412.19437, §3.3). Fast accumulation is on in `output` only, as in torchao.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8compile.errors import OptionError, unknown_name
from fp8compile.formats import (
    BLOCK128,
    E4M3,
    E5M2,
    GROUP128,
    ROW,
    TENSOR,
    Format,
    Granularity,
    parse_format,
    parse_granularity,
)


@dataclass(frozen=True)
class Delayed:
    """Scale from the maximum of the last `history` amaxes, times 2^margin (`fp8compile.delayed`)."""

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.history, int) and self.history > 0):
            raise OptionError(f"delayed scaling: history must be a positive integer, not {self.history!r}")
        if not isinstance(self.margin, int):
            raise OptionError(f"delayed scaling: margin is an integer (a power of two), not {self.margin!r}")


@dataclass(frozen=True)
class Cast:
    """How one operand becomes FP8: granularity and format, current scaling unless `delayed`."""

    granularity: Granularity = TENSOR
    format: Format = E4M3
    power_of_two: bool = False
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        if self.delayed is not None and self.granularity != TENSOR:
            raise OptionError(f"delayed scaling keeps one amax a tensor; it cannot be used with {self.granularity}")

    def __str__(self) -> str:
        marks = ("^2" if self.power_of_two else "") + (f" delayed({self.delayed.history})" if self.delayed else "")
        return f"{self.format} {self.granularity}{marks}"


@dataclass(frozen=True)
class Role:
    """How one of the three matmuls runs. left × right: activation × weight (output), gradient × weight (grad_input),
    gradient × activation (grad_weight)."""

    left: Cast = Cast()
    right: Cast = Cast()
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        kinds = {self.left.granularity.kind, self.right.granularity.kind}
        fine = {self.left.granularity, self.right.granularity} <= {GROUP128, BLOCK128}
        if kinds <= {"tensor", "row"}:
            if self.left.format == self.right.format == E5M2:
                raise OptionError("E5M2 × E5M2: FP8 units multiply at most one E5M2 operand")
            return
        if not fine or kinds == {"block"}:
            raise OptionError(
                f"granularities {self.left.granularity} × {self.right.granularity} have no matmul kernel; "
                "use tensor or row on both sides, or group(128) with group(128) or block(128)"
            )
        if self.left.format != E4M3 or self.right.format != E4M3:
            raise OptionError("group(128) and block(128) matmuls take E4M3 only")


@dataclass(frozen=True)
class Recipe:
    """The numerics of a training step. Build one with `Recipe.named`, `override`, or field by field."""

    name: str = "custom"
    output: Role | None = Role()
    grad_input: Role | None = Role()
    grad_weight: Role | None = Role()

    @staticmethod
    def named(name: str) -> Recipe:
        """The recipe called `name`; raises `OptionError` with the nearest valid name."""
        if name not in RECIPES:
            raise unknown_name("recipe", name, RECIPES)
        return RECIPES[name]

    @staticmethod
    def parse(value: Recipe | str | Mapping[str, Any]) -> Recipe:
        """A recipe from an object, a name, or {"base": name, role: {field: …}} as `override` takes it."""
        if isinstance(value, Recipe):
            return value
        if isinstance(value, str):
            return Recipe.named(value)
        if isinstance(value, Mapping):
            changes = {str(key): change for key, change in value.items()}
            return Recipe.parse(changes.pop("base", "mixed")).override(**changes)
        raise OptionError(f"recipe must be a name, a Recipe or a mapping, not {type(value).__name__}")

    def override(self, **roles: Mapping[str, Any] | Role | None) -> Recipe:
        """This recipe with some roles changed.

        >>> Recipe.named("mixed").override(
        ...     grad_input={"left": {"format": "e5m2"}},  # gradient in E5M2
        ...     grad_weight=None,  # stays BF16
        ... )
        """
        changed: dict[str, Role | None] = {}
        for name, change in roles.items():
            if name not in ROLES:
                raise unknown_name("role", name, ROLES)
            changed[name] = _changed_role(getattr(self, name), change)
        return dataclasses.replace(self, name=f"{self.name}*" if changed else self.name, **changed)  # type: ignore[arg-type]

    @property
    def is_delayed(self) -> bool:
        """Whether any operand takes its scale from a history."""
        roles = [r for r in (self.output, self.grad_input, self.grad_weight) if r is not None]
        return any(cast.delayed for r in roles for cast in (r.left, r.right))

    def role(self, name: str) -> Role | None:
        """The `Role` called `name`; None where that matmul stays BF16."""
        return getattr(self, name)


ROLES = ("output", "grad_input", "grad_weight")


def _changed_role(role: Role | None, change: Mapping[str, Any] | Role | None) -> Role | None:
    if change is None or isinstance(change, Role):
        return change
    if not isinstance(change, Mapping):
        raise OptionError(f"a role is a Role, None (BF16) or a mapping of its fields, not {change!r}")
    fields: dict[str, Any] = {}
    for name, value in change.items():
        if name in ("left", "right"):
            fields[name] = _changed_cast(getattr(role or Role(), name), value)
        elif name == "fast_accumulation":
            fields[name] = _flag(name, value)
        else:
            raise unknown_name("field of a role", name, ("left", "right", "fast_accumulation"))
    return dataclasses.replace(role or Role(), **fields)


def _changed_cast(cast: Cast, change: Mapping[str, Any] | Cast) -> Cast:
    if isinstance(change, Cast):
        return change
    if not isinstance(change, Mapping):
        raise OptionError(f"an operand is a Cast or a mapping of its fields, not {change!r}")
    fields: dict[str, Any] = {}
    for name, value in change.items():
        if name == "granularity":
            fields[name] = parse_granularity(value)
        elif name == "format":
            fields[name] = parse_format(value)
        elif name == "power_of_two":
            fields[name] = _flag(name, value)
        elif name == "delayed":
            fields[name] = _delayed(value)
        else:
            raise unknown_name("field of an operand", name, ("granularity", "format", "power_of_two", "delayed"))
    return dataclasses.replace(cast, **fields)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is True or False, not {value!r}")
    return value


def _delayed(value: Any) -> Delayed | None:
    """From True, None or False, a `Delayed`, or a mapping of its fields."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in ("history", "margin"):
                raise unknown_name("field of delayed scaling", name, ("history", "margin"))
        return Delayed(**value)
    if value is None or isinstance(value, (bool, Delayed)):
        return Delayed() if value is True else (value or None)
    raise OptionError(f"delayed scaling is True, None, or a mapping of history and margin, not {value!r}")


def _recipes() -> dict[str, Recipe]:
    tensor, row = Cast(TENSOR), Cast(ROW)
    group, block = Cast(GROUP128), Cast(BLOCK128)
    e5m2 = Cast(TENSOR, E5M2)
    rows = Role(row, row)
    made = [
        Recipe("mixed", Role(row, tensor, fast_accumulation=True), Role(tensor, tensor), Role(tensor, tensor)),
        Recipe("tensorwise", Role(tensor, tensor, fast_accumulation=True), Role(e5m2, tensor), Role(e5m2, tensor)),
        Recipe("rowwise", Role(row, row, fast_accumulation=True), rows, rows),
        Recipe("rowwise_with_gw_hp", Role(row, row, fast_accumulation=True), rows, None),
        Recipe("blockwise", Role(group, block), Role(group, block), Role(group, group)),
    ]
    return {recipe.name: recipe for recipe in made}


RECIPES = _recipes()
