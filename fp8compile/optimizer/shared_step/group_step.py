"""One group of parameters: sorted by kind, compared before each step with what it was, and stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor

from fp8compile.optimizer.shared_step.alike import Alike
from fp8compile.optimizer.shared_step.kinds import Kind
from fp8compile.optimizer.shared_step.together import Together, together
from fp8compile.options import Options


@dataclass
class GroupStep:
    """A group as it was when its parameters were sorted by kind.

    forms: of the settings that may change. shared: by which gradients are unscaled, by name. others: parameters without
    a state, for want of a gradient. together: made of `alike` by `prepare`.
    """

    parameters: list[Tensor]
    settings: dict[str, Any]
    forms: dict[str, Any]
    alike: list[Alike]
    shared: Mapping[str, Tensor]
    others: list[Tensor]
    together: list[Together] = field(default_factory=list)

    def prepare(self, group: Mapping[str, Any], options: Options) -> None:
        """Compile what computes the numbers of each kind."""
        self.together = together(self.alike, group, self.shared, options)

    def is_current(self, states: Mapping[Tensor, Any] | None, group: Mapping[str, Any]) -> bool:
        """Return True if all is as it was but for numbers that may change. states: None for the known ones."""
        now = group["params"]
        if len(now) != len(self.parameters) or not all(map(is_, now, self.parameters)):
            return False
        if any(p.grad is not None for p in self.others) or not same_settings(self.settings, group):
            return False
        if any(form_of(group[name]) != form for name, form in self.forms.items()):
            return False
        return all(x.is_current(states) for x in self.alike)

    def step(self, group: Mapping[str, Any]) -> None:
        """Update all parameters of the group that have gradients."""
        for x in self.together:
            x.step(group)


def same_settings(settings: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Return True if a group has these settings: tensors by identity."""
    return all(
        group[name] is value
        or (not isinstance(value, Tensor) and type(group[name]) is type(value) and group[name] == value)
        for name, value in settings.items()
    )


def form_of(value: Any) -> Any:
    """Return what code that reads a setting is compiled for: it takes any number, or tensors like this one."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape
    return tuple(map(form_of, value)) if isinstance(value, tuple) else "number"


def by_kind(parameters: Sequence[Tensor], kind_of: Callable[[Tensor], Kind]) -> dict[Kind, list[Tensor]]:
    """Return the parameters by kind, in their order."""
    found: dict[Kind, list[Tensor]] = {}
    for p in parameters:
        found.setdefault(kind_of(p), []).append(p)
    return found
