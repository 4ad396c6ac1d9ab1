"""The ranks that do something together, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; without one, this process alone."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Return the place of this process among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        """Return how many they are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def meet(self) -> None:
        """Wait for all of them."""
        if self.group is not None:
            dist.barrier(self.group)

    def gathered(self, value: T) -> list[T]:
        """Return what each of them has, by rank; waits for all."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, self.group)
        return found
