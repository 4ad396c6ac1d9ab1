"""`GatheredWeight`: a weight that arrived as FP8 payload and scale, and looks like a plain tensor.

    weight[R, C] ≈ payload[R, C] * scale          scale: FP32, [] or one for each 128×128 block

torch.compile sees through it (`__tensor_flatten__`): a graph has payload and scale as inputs and `fp8::dequantize`
where the weight is read, which the passes replace by the payload itself. Whoever else reads it reads a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile.errors import ShardingError
from fp8compile.torch_hooks.tensor_subclasses import (
    AS_THEY_ARE,
    no_torch_function,
    tree_map,
    without_memory,
    written_arguments,
)

aten = torch.ops.aten
TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class GatheredWeight(Tensor):
    """A weight gathered as FP8, read in `dtype`.

    payload: FP8 [R, C]; scale: FP32 as `granularity` ("tensor" or "block(128)") says.
    """

    payload: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> GatheredWeight:  # noqa: D102
        return without_memory(cls, payload, dtype=dtype)

    def __init__(self, payload: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> None:
        self.payload, self.scale, self.granularity = payload, scale, granularity

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["payload", "scale"], (self.granularity, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["payload"], inner["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled code depends on, for torch's caches."""
        return f"GatheredWeight {self.granularity} {tuple(self.shape)} {self.stride()} {self.dtype} {self.device}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GatheredWeight({list(self.shape)}, {self.granularity}, dtype={self.dtype}, device={self.device})"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Return the weight as a plain tensor."""
        return ops.dequantize(self.payload, self.scale, self.granularity, dtype or self.dtype)

    def like(self, function: Any, dtype: torch.dtype | None = None) -> GatheredWeight:
        """Return the same weight with `function` applied to its payload."""
        return GatheredWeight(function(self.payload), self.scale, self.granularity, dtype or self.dtype)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, GatheredWeight):
            kept = _kept(func, x, args, kwargs)
            if kept is not None:
                return kept
        if any(isinstance(value, GatheredWeight) for value in written_arguments(func, args, kwargs)):
            raise ShardingError(
                f"{func} would write to a weight that was gathered in FP8. It is read-only: write to the sharded "
                "parameter, outside of forward"
            )
        args, kwargs = tree_map(lambda v: v.dequantize() if isinstance(v, GatheredWeight) else v, (args, kwargs))
        return func(*args, **kwargs)


def _kept(func: Any, x: GatheredWeight, args: Any, kwargs: Any) -> GatheredWeight | None:
    """Return the result if it is the same payload, seen in another way; None for everything else."""
    if func in AS_THEY_ARE:
        return x.like(lambda payload: func(payload))
    if func in TRANSPOSES and x.dim() == 2:
        # the operator turns a tensor's or a block's scale with it: 2-D in both cases or a single number
        scale = func(x.scale, *args[1:]) if x.scale.dim() == 2 else x.scale
        return GatheredWeight(func(x.payload, *args[1:]), scale, x.granularity, x.dtype)
    if func in (aten.view.default, aten._unsafe_view.default) and list(args[1]) == list(x.shape):
        return x.like(lambda payload: payload.view(payload.shape))
    if func is aten.as_strided.default and (list(args[1]), list(args[2])) == (list(x.shape), list(x.stride())):
        return x.like(lambda payload: payload.view(payload.shape))
    device = kwargs.get("device", x.device)
    if func is aten._to_copy.default and torch.device(device) == x.device and kwargs.get("dtype", x.dtype) in FLOATS:
        return x.like(lambda payload: payload, kwargs.get("dtype"))  # autocast: nobody writes to it
    return None
