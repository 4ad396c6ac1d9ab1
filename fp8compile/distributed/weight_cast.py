"""How one weight becomes FP8, wherever it goes: what the parts of `prepare_fsdp` share.

WeightCast        name, format, granularity, and the scale of the whole weight
ShardedWeight     has one (sharded_weight.py): it is cast as that says when it is gathered
WeightScales      makes the scales of many, and marks them out of date (weight_scales.py)
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8compile.distributed.eager_casts import quantize
from fp8compile.errors import ShardingError
from fp8compile.formats import parse_granularity
from fp8compile.torch_hooks.local_parts import local_part

_keys = itertools.count()
_casts: weakref.WeakValueDictionary[int, WeightCast] = weakref.WeakValueDictionary()  # by `WeightCast.key`


class Scales(Protocol):
    """The scales of several weights, made at once. stepped: an optimizer has stepped since they were made."""

    format: str
    granularity: str
    power_of_two: bool
    stepped: bool
    casts: list[WeightCast]

    def update(self) -> None:
        """Make the scales of all weights."""


class WeightCast:
    """The cast of one weight to FP8: its name in the model, format, granularity; and where it is found."""

    def __init__(self, name: str, shape: Sequence[int], homes: Iterable[nn.Module], parameter: str, scales: Scales):
        """Describe a weight that is the attribute `parameter` of the modules `homes`."""
        self.name, self.shape, self.parameter = name, tuple(shape), parameter
        self.homes = [weakref.ref(home) for home in homes]
        self.scales = scales
        self.format, self.granularity, self.power_of_two = scales.format, scales.granularity, scales.power_of_two
        self.scale: Tensor | None = None  # a part of the buffer that all weights share
        self.payload: Tensor | None = None  # this rank's shard in FP8, if it is kept; as old as the scale
        self.payload_of = -1  # `ShardedWeight.serial` of that shard: a copy of it alone shares the cast
        self.seen: tuple[int, ...] | None = None  # `versions`, when the scale was made
        self.key = next(_keys)
        _casts[self.key] = self
        # The sharded parameter, which its module has not got while it is gathered. Not as a weak reference: torch does
        # not swap tensors that have one, as Module.to does.
        self.owner: DTensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCast:
        """Return a cast of its own for a copied module. A weight copied by itself goes by the scale of the original."""
        homes = [memo[id(home)] for ref in self.homes if (home := ref()) is not None and id(home) in memo]
        if not homes:
            return self
        scales = copy.deepcopy(self.scales, memo)
        cast = WeightCast(self.name, self.shape, homes, self.parameter, scales)
        scales.casts.append(cast)
        return cast

    def module(self) -> nn.Module | None:
        """Return a module that has it; None if all were dropped from the model."""
        return next((module for home in self.homes if (module := home()) is not None), None)

    @property
    def count(self) -> int:
        """The number of its scales."""
        return self.scale_shape[0] * self.scale_shape[1] if self.scale_shape else 1

    @property
    def scale_shape(self) -> list[int]:
        """The shape of its scales."""
        return parse_granularity(self.granularity).scale_shape(self.shape)

    @property
    def is_sharded(self) -> bool:
        """True once fully_shard has been called on the module that has it."""
        module = self.module()
        return module is None or self.owner is not None or isinstance(module._parameters.get(self.parameter), DTensor)

    def sharded(self) -> DTensor:
        """Return the sharded parameter. Raises `ShardingError` where fully_shard has not made one of it."""
        owner, module = self.owner, self.module()
        current = module._parameters.get(self.parameter) if module is not None else None
        if isinstance(current, DTensor) and isinstance(getattr(local_part(current), "cast", None), WeightCast):
            owner = current
        if owner is None:
            raise ShardingError(
                f"{self.name} was prepared by prepare_fsdp, but fully_shard has not sharded it: every prepared weight "
                "must be in a module that fully_shard was called on; or leave it out with prepare_fsdp(…, skip=…)"
            )
        self.owner = owner
        return owner

    @property
    def is_gone(self) -> bool:
        """True once the module is no longer there: it was dropped from the model."""
        return self.module() is None

    def versions(self) -> tuple[int, ...]:
        """Return numbers that change whenever the shard is written to, or exchanged for another one."""
        owner = self.sharded()
        local = local_part(owner)
        return local.serial, owner._version, local._version, local.data_._version

    def current_scale(self) -> Tensor:
        """Return the scale of the whole weight as it is now; after a change, that of every weight is made first."""
        if self.scale is None or self.scales.stepped or self.seen != self.versions():
            self.scales.update()
        assert self.scale is not None
        return self.scale


def cast_of(key: int) -> WeightCast:
    """Return the cast with this key."""
    return _casts[key]


def quantize_rows(shard: Tensor, scale: Tensor, cast: WeightCast, first: int) -> Tensor:
    """Return `shard`, the rows of a weight from row `first` on, as FP8 with the scale of the whole weight."""
    if cast.granularity == "tensor" or not shard.numel():
        return quantize(shard, scale, cast.format, "tensor" if scale.dim() == 0 else cast.granularity)
    rows = scale.repeat_interleave(128, 0)[first : first + shard.shape[0]]  # blocks may be cut anywhere
    return quantize(shard, rows.contiguous(), cast.format, "group(128)")
