"""Scales of sharded weights: of each whole weight, known to all ranks, by one all-reduce a step.

    amaxes of all shards ──► one buffer ──all-reduce(max)──► amaxes of all weights ──► scales

Before a weight is gathered its rank asks whether any weight has changed since; the first to be gathered after an
optimizer's step finds that all have, and the amaxes of all are taken at once. A change is seen by the version counters
that autograd keeps (any in-place operation raises them: a step, compiled or not, a checkpoint that is loaded) and by a
hook after every optimizer's step. All ranks run the same program, so they find the same and meet in one all-reduce.

Payloads are as old as scales, so where they are to be kept, shards are cast there as well (`shard_payloads.py`).

With 128×128 blocks a rank adds its rows' part to the amaxes of all blocks, so shards may cut blocks anywhere.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8compile.distributed.shard_payloads import ShardPayloads
from fp8compile.distributed.sharded_weight import CASTS, ShardedWeight, local_part
from fp8compile.errors import ShardingError
from fp8compile.formats import ceil_div, parse_granularity, round_up
from fp8compile.kernels.reference import markers

BLOCK = 128
ALIGNED = 4  # scales in 16 bytes
_keys = itertools.count()


class WeightCast:
    """How one weight becomes FP8: its name in the model, format, granularity; and where it is found."""

    def __init__(
        self, name: str, shape: Sequence[int], homes: Iterable[nn.Module], parameter: str, scales: WeightScales
    ):
        """homes: the modules that have it, as their attribute `parameter`."""
        self.name, self.shape, self.parameter = name, tuple(shape), parameter
        self.homes = [weakref.ref(home) for home in homes]
        self.scales = scales
        self.format, self.granularity, self.power_of_two = scales.format, scales.granularity, scales.power_of_two
        self.scale: Tensor | None = None  # a part of the buffer that all weights share
        self.payload: Tensor | None = None  # this rank's shard in FP8, if it is kept; as old as the scale
        self.payload_of = -1  # `ShardedWeight.serial` of that shard: a copy of it alone shares the cast
        self.seen: tuple[int, ...] | None = None  # `versions`, when the scale was made
        self.key = next(_keys)
        CASTS[self.key] = self
        # The sharded parameter, which its module has not got while it is gathered. Not as a weak reference: torch does
        # not swap tensors that have one, as Module.to does.
        self.owner: DTensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCast:
        """Of a copied module: a cast of its own. A weight copied by itself goes by the scale of the original."""
        homes = [memo[id(home)] for ref in self.homes if (home := ref()) is not None and id(home) in memo]
        if not homes:
            return self
        scales = copy.deepcopy(self.scales, memo)
        cast = WeightCast(self.name, self.shape, homes, self.parameter, scales)
        scales.casts.append(cast)
        return cast

    def module(self) -> nn.Module | None:
        """One that has it; None: all were dropped from the model."""
        return next((module for home in self.homes if (module := home()) is not None), None)

    @property
    def count(self) -> int:
        """How many scales it has."""
        return self.scale_shape[0] * self.scale_shape[1] if self.scale_shape else 1

    @property
    def scale_shape(self) -> list[int]:
        """Their shape."""
        return parse_granularity(self.granularity).scale_shape(self.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether fully_shard has been called on the module that has it."""
        module = self.module()
        return module is None or self.owner is not None or isinstance(module._parameters.get(self.parameter), DTensor)

    def sharded(self) -> DTensor:
        """The sharded parameter. Raises `ShardingError` where fully_shard has not made one of it."""
        owner, module = self.owner, self.module()
        current = module._parameters.get(self.parameter) if module is not None else None
        if isinstance(current, DTensor) and isinstance(local_part(current), ShardedWeight):
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
        """Whether the module is no longer there: it was dropped from the model."""
        return self.module() is None

    def versions(self) -> tuple[int, ...]:
        """What changes whenever the shard is written to, or exchanged for another one."""
        owner = self.sharded()
        local = local_part(owner)
        return local.serial, owner._version, local._version, local.data_._version

    def current_scale(self) -> Tensor:
        """The scale of the whole weight as it is now; the first to ask after a change makes those of all weights."""
        if self.scale is None or self.scales.stepped or self.seen != self.versions():
            self.scales.update()
        assert self.scale is not None
        return self.scale


class WeightScales:
    """The scales of all weights that one call of prepare_fsdp has prepared."""

    def __init__(self, format: str, granularity: str, power_of_two: bool, keep_casts: bool = False):
        self.format, self.granularity, self.power_of_two = format, granularity, power_of_two
        self.keep_casts = keep_casts
        self.payloads: dict[Any, ShardPayloads] = {}  # by mesh
        self.casts: list[WeightCast] = []
        self.stepped = False  # an optimizer has, since scales were made
        self.updates = 0  # how often they were made: all-reduces
        self.buffers: dict[Any, tuple[Tensor, Tensor]] = {}  # by mesh: where scales go, and where they are kept
        _install_hook()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightScales:
        """For a copy of the model, whose weights enter as they are copied."""
        return WeightScales(self.format, self.granularity, self.power_of_two, self.keep_casts)

    @torch.no_grad()
    def update(self) -> None:
        """Make the scales of all weights: one all-reduce (one for each mesh, if weights are sharded over several)."""
        meshes: dict[Any, list[WeightCast]] = {}
        self.casts = [cast for cast in self.casts if not cast.is_gone]
        for cast in self.casts:
            meshes.setdefault(_shard_mesh(cast.sharded(), cast.name), []).append(cast)
        for (mesh, dim), casts in meshes.items():
            amaxes = torch.cat(_local_amaxes(casts, mesh, dim)).to(mesh.device_type)
            # max ignores nan on some devices; of inf the scale is inf, and the weight becomes nan all the same
            amaxes = torch.where(amaxes.isnan(), torch.inf, amaxes)
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=mesh.get_group(dim))
            self._keep(mesh, casts, markers.scale(amaxes, self.format, self.power_of_two))
            if self.keep_casts:
                payloads = self.payloads.setdefault(mesh, ShardPayloads())
                payloads.update(casts, mesh.get_local_rank(dim), mesh.size(dim))
        self.stepped = False
        self.updates += 1

    def _keep(self, mesh: Any, casts: list[WeightCast], scales: Tensor) -> None:
        """In memory that stays: a gather on another stream may still read what was there before it is written.

        The scales of a weight start at a multiple of 16 bytes, as cuBLAS wants them.
        """
        counts = [cast.count for cast in casts]
        starts = [0, *itertools.accumulate(round_up(count, ALIGNED) for count in counts)]
        where, buffer = self.buffers.get(mesh, (None, None))
        if where is None or buffer is None or where.shape != scales.shape or buffer.shape != (starts[-1],):
            places = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]
            where, buffer = torch.cat(places).to(scales.device), scales.new_ones(starts[-1])
            self.buffers[mesh] = where, buffer
        buffer[where] = scales
        for cast, start, count in zip(casts, starts, counts, strict=False):
            cast.scale = buffer[start : start + count].view(cast.scale_shape)
            cast.seen = cast.versions()


def _shard_mesh(weight: DTensor, name: str) -> tuple[Any, int]:
    """The mesh and the one dimension of it over which rows of `weight` are sharded."""
    shards = [(i, placement.dim) for i, placement in enumerate(weight.placements) if isinstance(placement, Shard)]
    if len(shards) != 1 or shards[0][1] != 0:
        raise ShardingError(
            f"{name} is placed as {weight.placements}: weights are gathered in FP8 where their rows are sharded over "
            "one dimension of the mesh; leave this one out with prepare_fsdp(…, skip=…)"
        )
    return weight.device_mesh, shards[0][0]


def _local_amaxes(casts: list[WeightCast], mesh: Any, dim: int) -> list[Tensor]:
    """What this rank contributes to the amaxes of each weight: zeros for what it has nothing of."""
    shards = [_local(cast) for cast in casts]
    if casts[0].granularity == "tensor":
        full = [x for x in shards if x.numel()]
        norms = iter(torch._foreach_norm(full, torch.inf) if full else [])  # one launch; max |x| in one read
        return [(next(norms) if x.numel() else x.new_zeros(())).float().reshape(1) for x in shards]
    rank, ranks = mesh.get_local_rank(dim), mesh.size(dim)
    return [
        block_amaxes(x, rank * ceil_div(cast.shape[0], ranks), cast.shape).flatten()
        for cast, x in zip(casts, shards, strict=True)
    ]


def _local(cast: WeightCast) -> Tensor:
    local = local_part(cast.sharded())
    assert isinstance(local, ShardedWeight)
    return local.data_


def block_amaxes(shard: Tensor, first: int, shape: Sequence[int]) -> Tensor:
    """max |x| of each 128×128 block of a weight of this `shape`, over the rows that `shard` has of it (from row `first`
    on); 0 where it has none. FP32 [ceil(R / 128), ceil(C / 128)]."""
    grid = shard.new_zeros((ceil_div(shape[0], BLOCK), ceil_div(shape[1], BLOCK)), dtype=torch.float32)
    start, end = first, first + shard.shape[0]
    while start < end:  # rows up to a border of blocks, whole blocks, and what is left
        stop = (
            min(end, (start // BLOCK + 1) * BLOCK) if start % BLOCK else max(end - end % BLOCK, min(end, start + BLOCK))
        )
        part = markers.amax(shard[start - first : stop - first], "block(128)")
        top = start // BLOCK
        grid[top : top + part.shape[0]] = torch.maximum(grid[top : top + part.shape[0]], part)
        start = stop
    return grid


_hooks: list[Any] = []


def _install_hook() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _after_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    """Mark the scales of the weights that `opt` has stepped."""
    for group in opt.param_groups:
        for parameter in group["params"]:
            local = local_part(parameter)
            if isinstance(local, ShardedWeight):
                local.cast.scales.stepped = True
