"""`ShardedWeight`: a parameter that FSDP2 shards as it is and gathers as FP8.

    shard (FP32 or BF16) ──quantize, scale of the whole weight──► payload ──all-gather──► GatheredWeight

torch calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a sharded local tensor that has them: its documented
way for such extensions. Views, copies and moves that FSDP2 makes of a weight stay what they are; to everybody else
(optimizers, clipping, initialisation) it is the plain tensor `data_`, in place too.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.distributed.gathered_weight import GatheredWeight
from fp8compile.distributed.weight_cast import WeightCast, cast_of, quantize_rows
from fp8compile.errors import ShardingError
from fp8compile.formats import ceil_div
from fp8compile.torch_hooks.local_parts import local_part
from fp8compile.torch_hooks.tensor_subclasses import no_torch_function, tree_map, without_memory

aten = torch.ops.aten
# What fully_shard, Module._apply and loading make of a weight: still a weight that is gathered as FP8.
STAYS = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten.empty_like.default, aten.new_zeros.default,
    aten.slice.Tensor, aten.narrow.default, aten.view.default, aten.as_strided.default, aten._to_copy.default,
    aten._pin_memory.default, aten.split.Tensor, aten.chunk.default, aten.t.default,
}  # fmt: skip
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, aten.matmul.default}

_serials = itertools.count()


class ShardedWeight(Tensor):
    """`data_`: the (shard of a) weight; `cast`: how it becomes FP8, shared by all that is made of one weight."""

    data_: Tensor
    cast: WeightCast

    @staticmethod
    def __new__(cls, data_: Tensor, cast: WeightCast) -> ShardedWeight:  # noqa: D102
        pinned = data_.is_pinned() if data_.device.type == "cpu" else False
        return without_memory(cls, data_, storage_offset=data_.storage_offset(), pin_memory=pinned)

    def __init__(self, data_: Tensor, cast: WeightCast) -> None:
        self.data_, self.cast = data_, cast
        self.serial = next(_serials)  # tells it from every other one, also from those whose memory it has taken over

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["data_"], self.cast.key  # a number, as torch's caches pickle it

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["data_"], cast_of(context))

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled code depends on, for torch's caches."""
        return f"ShardedWeight {tuple(self.shape)} {self.stride()} {self.dtype} {self.device}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeight:
        copied: Any = super().__deepcopy__(memo)
        copied.serial = next(_serials)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedWeight({self.cast.name}, {list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, str, int]]:
        """Return what each rank sends, and what it keeps for itself: the scale of the whole weight, and R.

        It sends FP8 [ceil(R / ranks), C], padded with zeros where a rank has fewer rows.
        """
        scale, kept = self.cast.current_scale(), self.cast.payload
        rows = ceil_div(outer_size[0], mesh.size())
        if kept is not None and self.cast.payload_of == self.serial and kept.shape[0] == rows:
            return (kept,), (scale, self.cast.granularity, outer_size[0])
        payload = quantize_rows(self.data_, scale, self.cast, rows * mesh.get_local_rank())
        if payload.shape[0] < rows:
            missing = (0, 0, 0, rows - payload.shape[0])
            payload = F.pad(payload.view(torch.uint8), missing).view(payload.dtype)
        return (payload,), (scale, self.cast.granularity, outer_size[0])

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the gathered weight; None if `out`, that of the last time, is it: its memory has been filled again."""
        (padded,), (scale, granularity, rows) = outputs, metadata
        payload = padded[:rows]
        if out is None:  # FSDP2 frees and allocates the memory of what is named second, so: with the padding
            return GatheredWeight(payload, scale, granularity, param_dtype), (padded,)
        gathered = local_part(out)
        assert isinstance(gathered, GatheredWeight)
        assert gathered.payload.untyped_storage().data_ptr() == payload.untyped_storage().data_ptr()
        gathered.scale = scale
        return None

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MATMULS:
            unsharded = next((a.cast for a in args if isinstance(a, ShardedWeight) and not a.cast.is_sharded), None)
            if unsharded is not None:
                raise ShardingError(
                    f"prepare_fsdp was called for {unsharded.name}, but fully_shard was not, so nothing is gathered: "
                    "call fully_shard on each block and then on the model, after prepare_fsdp"
                )
        wrapped: dict[int, ShardedWeight] = {}

        def plain(x: Any) -> Any:
            if not isinstance(x, ShardedWeight):
                return x
            wrapped[id(x.data_)] = x
            return x.data_

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        stays = func in STAYS and isinstance(args[0], ShardedWeight) and _is_weight(result, args[0])

        def back(x: Any) -> Any:
            if id(x) in wrapped:  # written in place
                return wrapped[id(x)]
            return ShardedWeight(x, args[0].cast) if stays and isinstance(x, Tensor) else x

        return tree_map(back, result)


def _is_weight(result: Any, of: ShardedWeight) -> bool:
    """Return True if `result` can still be gathered: what was made of another dtype for reading cannot."""
    first = result[0] if isinstance(result, (list, tuple)) else result
    return first.is_floating_point()
