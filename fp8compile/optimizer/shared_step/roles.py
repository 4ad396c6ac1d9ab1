"""Roles: what a tensor of a traced step is to the optimizer, and where a step finds it for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.optimizer.state_parts import INNER
from fp8compile.optimizer.states import FP8State
from fp8compile.torch_hooks.local_parts import local_part

PARAMETER, GRADIENT, STATE, SETTING, UNSCALE = "parameter", "gradient", "state", "setting", "unscale"


class NotAlikeError(Exception):
    """Parameters cannot be shown to be updated alike; the text says why."""


class SparseGradientError(NotAlikeError):
    """Raised for a gradient that torch.compile does not support."""


class StatesToComeError(NotAlikeError):
    """A step makes states while it steps: the next one may be traced."""


@dataclass(frozen=True)
class Role:
    """One tensor: of a parameter (`member` says which of those that are traced), or one that all share.

    name: of a state or a setting; part: of an 8-bit state, or the place in a setting that is a tuple.
    """

    kind: str
    name: str = ""
    part: str = ""
    member: int | None = None

    @property
    def of_any(self) -> Role:
        """The same role of any parameter."""
        return replace(self, member=None)

    @property
    def is_shared(self) -> bool:
        """True for what all parameters of a group read."""
        return self.kind in (SETTING, UNSCALE)


def tensor_of(role: Role, parameter: Tensor, states: Mapping[str, Any]) -> Tensor:
    """Return the tensor that has this role for a parameter with these states: what this rank has of it."""
    if role.kind == PARAMETER:
        return local_part(parameter)
    if role.kind == GRADIENT:
        return local_part(parameter.grad)
    found = local_part(states[role.name])
    return getattr(found, role.part) if role.part else found


def roles_of(parameter: Tensor, states: Mapping[str, Any], member: int) -> dict[int, Role]:
    """Return the roles of all tensors of one parameter, by id."""
    found = {id(parameter): Role(PARAMETER, member=member), id(parameter.grad): Role(GRADIENT, member=member)}
    for name, state in states.items():
        if isinstance(state, FP8State):
            parts = [part for part in INNER if getattr(state, part) is not None]
            found |= {id(getattr(state, part)): Role(STATE, name, part, member) for part in parts}
        elif isinstance(state, Tensor):
            found[id(state)] = Role(STATE, name, member=member)
    return found


def setting(group: Mapping[str, Any], role: Role) -> Any:
    """Return the number, or the tensor, of a role that all parameters of a group share."""
    found = group[role.name]
    return found[int(role.part)] if role.part else found


def as_number(value: Any) -> Tensor:
    """Return a setting as Dynamo hands it to a graph: a float in 64 bits, on the CPU."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
