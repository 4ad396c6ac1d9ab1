"""Setting `ranks` of the automatic mode: ranks that decide together.

All of a group must run the same graphs equally often, as those of FSDP2 and DDP do with as many batches each: what one
rank gives, the others wait for.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp8compile.distributed.ranks import Ranks
from fp8compile.errors import OptionError

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


def mean(loss: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean of the ranks' numbers [], on their device, without waiting for it."""
    if ranks.group is None:
        return loss
    total = loss.detach().float().clone()
    dist.all_reduce(total, group=ranks.group)
    return total / ranks.world
