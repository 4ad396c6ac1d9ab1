"""Ranks that decide together: each gives what it knows, and all decide by the same (setting `ranks`).

All of a group must run the same graphs equally often, as those of FSDP2 and DDP do with as many batches each: what one
rank gives, the others wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile.errors import OptionError

T = TypeVar("T")
WORLD = "world"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; without one, this rank alone."""

    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(setting: Any) -> Ranks:
        """Return the ranks of the setting `ranks`: None, "world", or a process group. Raises `OptionError`."""
        if setting is None:
            return Ranks()
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError("adaptive: ranks decide together after torch.distributed.init_process_group")
        return Ranks(dist.group.WORLD if setting == WORLD else setting)

    def gather(self, mine: T) -> list[T]:
        """Return what all ranks give, in their order; waits for them."""
        if self.group is None:
            return [mine]
        everything: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everything, mine, self.group)
        return everything

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean of the ranks' numbers, on their device, without waiting for it."""
        if self.group is None:
            return loss
        total = loss.detach().float().clone()
        dist.all_reduce(total, group=self.group)
        return total / dist.get_world_size(self.group)

    def first_failure(self, why: str) -> str:
        """Return why this rank, or the first other one, failed; "" if none did."""
        reasons = self.gather(why)
        if why or not any(reasons):
            return why
        rank = next(i for i, reason in enumerate(reasons) if reason)
        return f"rank {rank} of the group: {reasons[rank]}"


def is_setting(value: Any) -> bool:
    """Return True of what `ranks` may be."""
    group = torch.distributed.ProcessGroup if dist.is_available() else ()
    return value is None or value == WORLD or isinstance(value, group)
