"""Setting `ranks` of the automatic mode: ranks that decide together.

All of a group must run the same graphs equally often, as those of FSDP2 and DDP do with as many batches each, of the
same lengths or all traced with symbolic ones: what one rank gives, the others wait for. Where messages of different
places meet, all of these ranks raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fp8compile.distributed.ranks import Ranks
from fp8compile.errors import OptionError, ShardingError

T = TypeVar("T")
WORLD = "world"


def is_setting(value: Any) -> bool:
    """Return True of what `ranks` may be."""
    return value is None or value == WORLD or (dist.is_available() and isinstance(value, dist.ProcessGroup))


def ranks_of(setting: Any) -> Ranks:
    """Return the ranks of None, "world" or a process group. Raises `OptionError` where there is no group yet."""
    if setting is None:
        return Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError("adaptive: ranks decide together after torch.distributed.init_process_group")
    return Ranks(dist.group.WORLD if setting == WORLD else setting)


@dataclass(frozen=True)
class Agreement:
    """The ranks that decide about one graph together, each message with its place in the run of the graph."""

    ranks: Ranks
    graph: str

    @property
    def is_alone(self) -> bool:
        """True if this process decides for itself."""
        return self.ranks.group is None

    def gathered(self, what: str, value: T) -> list[T]:
        """Return what each rank has, by rank; waits for all. Raises `ShardingError` where one has come elsewhere."""
        if self.is_alone:
            return [value]
        found = self.ranks.gathered((f"{what} of {self.graph}", value))
        if len({place for place, _ in found}) > 1:
            places = "; ".join(f"rank {i}: {place}" for i, (place, _) in enumerate(found))
            raise ShardingError(
                f"adaptive: ranks that decide together ran different graphs ({places}). Give them batches of the same "
                "lengths, compile with dynamic=True, or leave 'ranks' out"
            )
        return [value for _, value in found]

    def any(self, what: str, value: bool) -> bool:
        """Return True if it is so on any rank."""
        return any(self.gathered(what, value))

    def first_failure(self, what: str, why: str) -> str:
        """Return why this rank failed, or else the first other one that did; "" if none did."""
        reasons = self.gathered(what, why)
        if why or not any(reasons):
            return why
        rank = next(i for i, reason in enumerate(reasons) if reason)
        return f"rank {rank} of the group: {reasons[rank]}"


def mean(loss: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean of the ranks' numbers [], on their device, without waiting for it."""
    if ranks.group is None:
        return loss
    total = loss.detach().float().clone()
    dist.all_reduce(total, group=ranks.group)
    return total / ranks.world
