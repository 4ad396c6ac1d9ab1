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

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8compile.distributed.shard_payloads import ShardPayloads
from fp8compile.distributed.sharded_weight import ShardedWeight
from fp8compile.distributed.weight_cast import WeightCast
from fp8compile.errors import ShardingError
from fp8compile.formats import ceil_div, round_up
from fp8compile.kernels.reference import markers
from fp8compile.torch_hooks.local_parts import local_part

BLOCK = 128
ALIGNED = 4  # scales in 16 bytes


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
        """Return one for a copy of the model, whose weights enter as they are copied."""
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
        """Write the scales into memory that stays: a gather on another stream may still read what was there before.

        The scales of a weight start at a multiple of 16 bytes, as cuBLAS wants them.
        """
        counts = [cast.count for cast in casts]
        starts = [0, *itertools.accumulate(round_up(count, ALIGNED) for count in counts)]
        where, buffer = self.buffers.get(mesh, (None, None))
        if where is None or buffer is None or where.shape != scales.shape or buffer.shape != (starts[-1],):
            places = [
                torch.arange(start, start + count, dtype=torch.int64, device="cpu")
                for start, count in zip(starts, counts, strict=False)
            ]
            where, buffer = torch.cat(places).to(scales.device), scales.new_ones(starts[-1])
            self.buffers[mesh] = where, buffer
        buffer[where] = scales
        for cast, start, count in zip(casts, starts, counts, strict=False):
            cast.scale = buffer[start : start + count].view(cast.scale_shape)
            cast.seen = cast.versions()


def _shard_mesh(weight: DTensor, name: str) -> tuple[Any, int]:
    """Return the mesh and the one dimension of it over which rows of `weight` are sharded."""
    shards = [(i, placement.dim) for i, placement in enumerate(weight.placements) if isinstance(placement, Shard)]
    if len(shards) != 1 or shards[0][1] != 0:
        raise ShardingError(
            f"{name} is placed as {weight.placements}: weights are gathered in FP8 where their rows are sharded over "
            "one dimension of the mesh; leave this one out with prepare_fsdp(…, skip=…)"
        )
    return weight.device_mesh, shards[0][0]


def _local_amaxes(casts: list[WeightCast], mesh: Any, dim: int) -> list[Tensor]:
    """Return what this rank contributes to the amaxes of each weight: zeros for what it has nothing of."""
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
    """Return max |x| of each 128×128 block of a weight of this `shape`, over the rows that `shard` has of it.

    The shard begins with row `first`; a block of which it has none is 0. FP32 [ceil(R / 128), ceil(C / 128)].
    """
    grid = shard.new_zeros((ceil_div(shape[0], BLOCK), ceil_div(shape[1], BLOCK)), dtype=torch.float32)
    start, end = first, first + shard.shape[0]
    while start < end:  # rows up to a border of blocks, whole blocks, and the rest
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
