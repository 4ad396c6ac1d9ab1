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
| auto                 | as mixed at first; then what is measured decides (`fp8compile/adaptive/`) | | |

Grouped matmuls (experts) run as row × row under every recipe; but for grad_weight and the weights of grad_input, of
which each expert has a scale where the recipe says tensor (`passes/matmul/grouped_matmuls.py`). A row or group
always lies along the contracted dimension. In grad_weight that is the token dimension: the matmul units allow nothing
else there; what is only *saved* in FP8 never groups across tokens.
Sources: mixed is the measured choice of this project; tensorwise, rowwise and rowwise_with_gw_hp follow torchao's
float8 training (their power-of-two row scales by `power_of_two=True`); blockwise follows DeepSeek-V3 (arXiv 2412.19437,
§3.3). Fast accumulation is on in `output` only, as in torchao.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8compile.errors import OptionError, inside, shown, unknown_name
from fp8compile.formats import (
    BLOCK128,
    E4M3,
    E5M2,
    FORMATS,
    GROUP128,
    ROW,
    TENSOR,
    Format,
    Granularity,
    parse_format,
    parse_granularity,
)

ROLES = ("output", "grad_input", "grad_weight")
AUTO = "auto"
LONGEST_HISTORY = 65536  # amaxes, which one kernel a cast reads each step
WIDEST_MARGIN = 64  # powers of two; beyond, scales leave the range of FP32


def _flag(name: str, value: Any, or_none: bool = False) -> Any:
    if not isinstance(value, bool) and not (or_none and value is None):
        raise OptionError(f"{name} is True or False{', or None' if or_none else ''}, not {shown(value)}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_type(name: str, value: Any, kind: type, or_none: bool = False) -> None:
    """Raise `OptionError` for a field that holds something else than the class made for it."""
    if not isinstance(value, kind) and not (or_none and value is None):
        valid = f"a {kind.__name__}{' or None' if or_none else ''}"
        raise OptionError(f"{name} is {valid}, not {shown(value)} (names are read in a mapping: Recipe.parse)")


@dataclass(frozen=True)
class Delayed:
    """Scale from the maximum of the last `history` amaxes, times 2^margin (`fp8compile.delayed`)."""

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        if not (_is_int(self.history) and 0 < self.history <= LONGEST_HISTORY):
            raise OptionError(
                f"delayed scaling: history must be a positive integer, at most {LONGEST_HISTORY}, not "
                f"{shown(self.history)}"
            )
        if not (_is_int(self.margin) and abs(self.margin) <= WIDEST_MARGIN):
            raise OptionError(
                f"delayed scaling: margin is an integer (a power of two) from {-WIDEST_MARGIN} to {WIDEST_MARGIN}, not "
                f"{shown(self.margin)}"
            )


@dataclass(frozen=True)
class Cast:
    """The cast of one operand to FP8: granularity and format, current scaling unless `delayed`."""

    granularity: Granularity = TENSOR
    format: Format = E4M3
    power_of_two: bool = False
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        _check_type("granularity", self.granularity, Granularity)
        _check_type("format", self.format, Format)
        if self.format not in FORMATS.values():
            raise unknown_name("format", self.format.name, FORMATS)
        _flag("power_of_two", self.power_of_two)
        _check_type("delayed", self.delayed, Delayed, or_none=True)
        if self.delayed is not None and self.granularity != TENSOR:
            raise OptionError(f"delayed scaling keeps one amax a tensor; it cannot be used with {self.granularity}")

    def __str__(self) -> str:
        marks = ("^2" if self.power_of_two else "") + (f" delayed({self.delayed.history})" if self.delayed else "")
        return f"{self.format} {self.granularity}{marks}"


@dataclass(frozen=True)
class Role:
    """The casts of one of the three matmuls.

    left × right: activation × weight (output), gradient × weight (grad_input), gradient × activation (grad_weight).
    fast_accumulation: True lets a GPU sum in fewer bits, which is faster (docs/benchmarks.md has what it loses). None:
    in output and grad_input of experts' grouped matmuls alone, which sum over weights.
    """

    left: Cast = Cast()
    right: Cast = Cast()
    fast_accumulation: bool | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            _check_type(name, getattr(self, name), Cast)
        _flag("fast_accumulation", self.fast_accumulation, or_none=True)
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OptionError(f"a recipe's name is a string, not {shown(self.name)}")
        for name in ROLES:
            _check_type(name, getattr(self, name), Role, or_none=True)

    @staticmethod
    def named(name: str) -> Recipe:
        """Return the recipe called `name`; raises `OptionError` with the nearest valid name."""
        if name not in RECIPES:
            raise unknown_name("recipe", name, RECIPES)
        return RECIPES[name]

    @staticmethod
    def parse(value: Recipe | str | Mapping[str, Any]) -> Recipe:
        """Return a recipe from an object, a name, or {"base": name, role: {field: …}} as `override` takes it."""
        if isinstance(value, Recipe):
            return value
        if isinstance(value, str):
            return Recipe.named(value)
        if isinstance(value, Mapping):
            changes = {str(key): change for key, change in value.items()}
            return Recipe.parse(changes.pop("base", "mixed")).override(**changes)
        raise OptionError(f"recipe must be a name, a Recipe or a mapping, not {shown(value)}")

    def override(self, **roles: Mapping[str, Any] | Role | None) -> Recipe:
        """Return this recipe with some roles changed.

        >>> Recipe.named("mixed").override(
        ...     grad_input={"left": {"format": "e5m2"}},  # gradient in E5M2
        ...     grad_weight=None,  # stays BF16
        ... )
        """
        changed: dict[str, Role | None] = {}
        for name, change in roles.items():
            if name not in ROLES:
                raise unknown_name("role", name, ROLES)
            with inside(name):
                changed[name] = _changed_role(getattr(self, name), change)
        return dataclasses.replace(self, name=f"{self.name}*" if changed else self.name, **changed)  # type: ignore[arg-type]

    @property
    def is_delayed(self) -> bool:
        """True if any operand takes its scale from a history."""
        roles = [r for r in (self.output, self.grad_input, self.grad_weight) if r is not None]
        return any(cast.delayed for r in roles for cast in (r.left, r.right))

    @property
    def is_auto(self) -> bool:
        """True for the recipe "auto", also with other casts to begin with: casts are chosen by what they lose."""
        return self.name.rstrip("*") == AUTO

    def role(self, name: str) -> Role | None:
        """Return the `Role` called `name`; None where that matmul stays BF16."""
        return getattr(self, name)


def _changed_role(role: Role | None, change: Mapping[str, Any] | Role | None) -> Role | None:
    if change is None or isinstance(change, Role):
        return change
    if not isinstance(change, Mapping):
        raise OptionError(f"a role is a Role, None (BF16) or a mapping of its fields, not {shown(change)}")
    fields: dict[str, Any] = {}
    for name, value in change.items():
        if name in ("left", "right"):
            with inside(name):
                fields[name] = _changed_cast(getattr(role or Role(), name), value)
        elif name == "fast_accumulation":
            fields[name] = _flag(name, value, or_none=True)
        else:
            raise unknown_name("field of a role", name, ("left", "right", "fast_accumulation"))
    return dataclasses.replace(role or Role(), **fields)


def _changed_cast(cast: Cast, change: Mapping[str, Any] | Cast) -> Cast:
    if isinstance(change, Cast):
        return change
    if not isinstance(change, Mapping):
        raise OptionError(f"an operand is a Cast or a mapping of its fields, not {shown(change)}")
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


def _delayed(value: Any) -> Delayed | None:
    """Return a `Delayed` from True, None or False, a `Delayed`, or a mapping of its fields."""
    if isinstance(value, Mapping):
        for name in value:
            if name not in ("history", "margin"):
                raise unknown_name("field of delayed scaling", name, ("history", "margin"))
        return Delayed(**value)
    if value is None or isinstance(value, (bool, Delayed)):
        return Delayed() if value is True else (value or None)
    raise OptionError(f"delayed scaling is True, None, or a mapping of history and margin, not {shown(value)}")


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
    made.append(dataclasses.replace(made[0], name=AUTO))
    return {recipe.name: recipe for recipe in made}


RECIPES = _recipes()
