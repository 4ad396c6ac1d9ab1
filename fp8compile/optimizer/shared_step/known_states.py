"""Known states: whether an optimizer has the mappings of states that it had, seen once a step for all parameters.

Looking up each parameter calls `Tensor.__hash__`, which is Python. The mappings of all parameters, in their order, are
compared without it: loading a checkpoint, a new parameter or group leave another list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor


@dataclass
class KnownStates:
    """The parameters and mappings of one optimizer, as they were when all of its groups had been looked at."""

    parameters: list[Tensor] = field(default_factory=list)
    mappings: list[Any] = field(default_factory=list)
    is_same: bool | None = None  # in this step; None before anybody asks
    seen: set[int] = field(default_factory=set)  # groups that were looked at in this step

    def begin_step(self) -> None:
        """Compare anew when asked next: not before a closure has run."""
        self.is_same = None
        self.seen.clear()

    def differing(self, states: Mapping[Tensor, Any]) -> Mapping[Tensor, Any] | None:
        """Return `states`, or None if they are the known ones."""
        if self.is_same is None:
            self.is_same = (
                len(states) == len(self.parameters)
                and all(map(is_, states, self.parameters))
                and all(map(is_, states.values(), self.mappings))
            )
        return None if self.is_same else states

    def found(self, states: Mapping[Tensor, Any], group: int, groups: int) -> None:
        """Take `states` for the known ones, when the last of the groups has been looked at by itself."""
        if self.is_same:
            return
        self.seen.add(group)
        if len(self.seen) == groups:
            self.parameters, self.mappings = list(states), list(states.values())
