"""FP8 shards that are kept from one change of the weights to the next, by request, so that each is cast once a step.

FSDP2 gathers a weight for forward and again for backward, of every microbatch, and asks for its shard in FP8 each time.
All shards are cast when their scales have been made, in one launch, into memory that stays: one byte an element of the
shards, for which a gather costs the host next to nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.distributed.weight_cast import WeightCast, quantize_rows
from fp8compile.formats import FORMATS, ceil_div
from fp8compile.torch_hooks.local_parts import local_part


class ShardPayloads:
    """The payloads of weights that are sharded over the same ranks."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.float32, device="cpu")
        self.shapes: list[tuple[int, int]] = []
        self.launches: dict[Any, Any] = {}  # by kind of part

    def update(self, casts: Sequence[WeightCast], rank: int, ranks: int) -> None:
        """Cast the shards that this rank has of weights; the scales of each are known.

        What is not beside its scales (in a CPU's memory, and moved for each gather) is left to be cast then; so is a
        shard of more rows than FSDP2 makes.
        """
        kept, serials = [], []
        for cast in casts:
            assert cast.scale is not None
            local = local_part(cast.sharded())
            shard, cast.payload = local.data_, None  # until all are made: a kernel may not compile, memory may run out
            rows = ceil_div(cast.shape[0], ranks)
            if shard.device == cast.scale.device and shard.shape[0] <= rows:
                kept.append((cast, shard, rows))
                serials.append(local.serial)
        payloads = self._memory([(rows, cast.shape[1]) for cast, _, rows in kept], [shard for _, shard, _ in kept])
        parts: list[Any] = []
        for (cast, shard, rows), payload in zip(kept, payloads, strict=True):
            first = rank * rows
            if not shard.numel():
                continue
            part = _part(cast, shard, payload, first)
            if part is not None:
                parts.append(part)
            else:
                payload[: shard.shape[0]] = quantize_rows(shard, cast.scale, cast, first)
        for kind in dict.fromkeys(part.kind for part in parts):
            self._launch(kind).run([part for part in parts if part.kind == kind])
        for (cast, _, _), payload, serial in zip(kept, payloads, serials, strict=True):
            cast.payload, cast.payload_of = payload, serial

    def _memory(self, shapes: list[tuple[int, int]], like: list[Tensor]) -> list[Tensor]:
        """Return memory for payloads of `shapes`: zeros where a rank has fewer rows than others."""
        if not shapes:
            return []
        sizes = [rows * columns for rows, columns in shapes]
        if shapes != self.shapes or self.buffer.device != like[0].device:
            self.buffer, self.shapes = torch.zeros(sum(sizes), dtype=torch.uint8, device=like[0].device), shapes
        starts = itertools.accumulate(sizes, initial=0)
        return [
            self.buffer[start : start + size].view(FORMATS["e4m3"].dtype).view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    def _launch(self, kind: Any) -> Any:
        from fp8compile.kernels.casts.cast_tiles import Launch  # it needs Triton, which a CPU may be without

        return self.launches.setdefault(kind, Launch())


def _part(cast: WeightCast, shard: Tensor, payload: Tensor, first: int) -> Any:
    """Return `shard` as the kernel that casts many takes it; None if it does not take it."""
    if shard.device.type == "cpu":
        return None
    from fp8compile.kernels.casts.cast_tiles import DTYPES, Part

    assert cast.scale is not None
    part = Part(shard, payload, cast.scale, first)
    return part if part.is_aligned and shard.dtype in DTYPES else None
