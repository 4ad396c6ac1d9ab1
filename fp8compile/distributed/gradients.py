"""Gradients exchanged in FP8: `compress_gradients` for DDP and for FSDP2.

    each rank   [ its part for rank 0 | for rank 1 | … ]  ──FP8, a scale for each 128──► all-to-all
    each rank   dequantize, add up in FP32, divide                                       = reduce-scatter
    DDP only    its part of the mean ──FP8──► all-gather                                 = all-reduce

A byte and 1/32 for each element goes over the wire instead of two or four. Sums are taken in FP32, of values that have
been rounded once (DDP: the mean once more, alike on all ranks, so that they stay equal). Scales are of 128 neighbours:
parameters of different magnitudes lie side by side in a bucket. An inf or a nan makes its group nan: it is seen.

Error feedback (DDP; Seide et al. 2014, Karimireddy et al. arXiv 1901.09847) keeps what rounding has taken from this
rank's gradient and adds it to the next: the sum over steps loses nothing. It costs an FP32 buffer in the size of the
gradient; what rounding takes from the mean is kept by the rank that has rounded it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fp8compile.distributed.eager_casts import quantize_groups
from fp8compile.errors import OptionError, ShardingError
from fp8compile.formats import ceil_div, parse_format

GROUP = 128
SCALE_BYTES = 4
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


def compress_gradients(model: nn.Module, format: str = "e4m3", *, error_feedback: bool = False) -> nn.Module:
    """Exchange gradients of `model` in FP8; return `model`, changed in place.

    `model` is a `DistributedDataParallel`, or has modules that `fully_shard` was called on: call it after either.
    format: "e4m3" (relative rounding error at most 2⁻⁴ an element) or "e5m2" (2⁻³, a wider range within 128 elements).
    error_feedback: keep what rounding takes for the next step; for DDP (FSDP2 would have to keep a whole gradient).

    Raises `OptionError` for an unknown format, a model that is neither, or `error_feedback` with FSDP2; and
    `ShardingError`, in backward, where FSDP2 wants another reduction than a sum or a mean.
    """
    name = parse_format(format).name
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(_Feedback(name, error_feedback, model.process_group), _ddp_hook)
        return model
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise OptionError(
            "compress_gradients has found nothing to do: the model is no DistributedDataParallel, and fully_shard was "
            "called on none of its modules"
        )
    if error_feedback:
        raise OptionError(
            "error_feedback=True keeps a whole gradient on each rank, which FSDP2 is there to avoid: it is for DDP"
        )
    for module in sharded:
        module.set_custom_reduce_scatter(CompressedReduceScatter(name))  # type: ignore[arg-type]
    return model


# ---- packing --------------------------------------------------------------------------------------------------------


def pack(x: Tensor, format: str) -> Tensor:
    """Return x [parts, n], n a multiple of 128, as bytes [parts, n + n / 32]: FP8 data, then its scales."""
    payload, scale = quantize_groups(x.reshape(-1, GROUP), format)
    return torch.cat([part.view(torch.uint8).view(len(x), -1) for part in (payload, scale)], 1)


def unpack(packed: Tensor, format: str) -> Tensor:
    """Return what `pack` made as FP32 [parts, n]."""
    n = packed.shape[1] * GROUP // (GROUP + SCALE_BYTES)
    payload = packed[:, :n].contiguous().view(parse_format(format).dtype)
    scale = packed[:, n:].contiguous().view(torch.float32)
    return (payload.float().view(len(packed), -1, GROUP) * scale.unsqueeze(-1)).view(len(packed), n)


def _parts(x: Tensor, count: int) -> Tensor:
    """Return a vector as [count, n], zeros appended so that n is a multiple of 128."""
    n = ceil_div(ceil_div(x.numel(), count), GROUP) * GROUP
    return F.pad(x, (0, count * n - x.numel())).view(count, n)


def _exchanged(packed: Tensor, format: str, group: Any) -> Tensor:
    """Send `packed`, a part for each rank; return what all ranks have sent to this one, [ranks, n] in FP32."""
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return unpack(received, format)


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


class CompressedReduceScatter:
    """FSDP2's reduce-scatter (`FSDPModule.set_custom_reduce_scatter`), in FP8."""

    def __init__(self, format: str):
        self.format = format
        self.sent = 0  # bytes that this rank has handed to collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what comes in and goes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Make `output_tensor` [n] the sum or mean over ranks of this rank's part of `input_tensor` [ranks · n]."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ShardingError(
                "gradients in FP8 can be summed or averaged, and FSDP2 asks for another reduction (a divide factor of "
                "the user's does): call set_force_sum_reduction_for_comms(True) on the sharded modules as well"
            )
        ranks = group.size()
        parts = input_tensor.float().view(ranks, -1)
        n = parts.shape[1]
        packed = pack(F.pad(parts, (0, -n % GROUP)), self.format)
        self.sent += packed.numel()
        total = _exchanged(packed, self.format, group).sum(0)[:n]
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


# ---- DDP ------------------------------------------------------------------------------------------------------------


Taken = dict[tuple[int, ...], Tensor]


class _Feedback:
    """State of the DDP hook: the format, and what rounding has taken so far, by the parameters of a bucket.

    DDP makes its buckets anew after the first step, of other parameters or in another order.
    """

    def __init__(self, format: str, enabled: bool, group: Any):
        self.format, self.enabled, self.group = format, enabled, group
        self.taken: Taken = {}  # from this rank's gradients
        self.taken_from_mean: Taken = {}  # from the part of the mean that this rank makes
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which gradients are exchanged."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def corrected(self, kept: Taken, bucket: tuple[int, ...], x: Tensor) -> Tensor:
        """Return `x` with what was taken the last time added. What overlaps this bucket otherwise is forgotten."""
        for other in [other for other in kept if other != bucket and not set(other).isdisjoint(bucket)]:
            del kept[other]
        last = kept.get(bucket)
        return x if last is None else x + last

    def remember(self, kept: Taken, bucket: tuple[int, ...], x: Tensor, packed: Tensor) -> None:
        """Keep what packing has taken from `x`; nothing of what is not finite, which would never go away."""
        if self.enabled:
            kept[bucket] = (x - unpack(packed, self.format)).nan_to_num_(0.0, 0.0, 0.0)


def _ddp_hook(state: _Feedback, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Make a bucket the mean over all ranks, in place, as DDP wants it.

    Collectives are called one after the other, in the order of buckets, which all ranks share: on a GPU on a stream of
    their own, beside backward.
    """
    gradient, parameters = bucket.buffer(), tuple(id(p) for p in bucket.parameters())
    if gradient.device.type == "cpu":
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(_mean(state, parameters, gradient))
        return future
    future = torch.futures.Future(devices=[gradient.device])
    stream = state.stream_on(gradient.device)
    stream.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(stream):
        future.set_result(_mean(state, parameters, gradient))  # others wait for what is on this stream by now
    return future


# DDP compares these with the classes, and does not read text
_ddp_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


@torch.no_grad()
def _mean(state: _Feedback, bucket: tuple[int, ...], gradient: Tensor) -> Tensor:
    ranks = dist.get_world_size(state.group)
    parts = state.corrected(state.taken, bucket, _parts(gradient.float(), ranks))
    packed = pack(parts, state.format)
    state.remember(state.taken, bucket, parts, packed)
    mean = _exchanged(packed, state.format, state.group).sum(0, keepdim=True) / ranks
    mean = state.corrected(state.taken_from_mean, bucket, mean)
    mine = pack(mean, state.format)
    state.remember(state.taken_from_mean, bucket, mean, mine)
    everything = mine.new_empty((ranks, mine.shape[1]))
    ALL_GATHER(everything, mine, group=state.group)
    return gradient.copy_(unpack(everything, state.format).view(-1)[: gradient.numel()])
