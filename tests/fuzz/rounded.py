"""Eager PyTorch with FP8's roundings: every matmul's operands, forward and backward, and every saved activation.

Nothing here comes from fp8compile. More is rounded than any recipe rounds (matmuls that stay BF16, values that are
kept as they are). Its error is what a recipe's is measured by, tensor by tensor, the model's conditioning included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_quantized import E4M3, E5M2

aten = torch.ops.aten
# operator -> which arguments are its operands, and the dimension of each that is contracted
OPERANDS = {
    aten.mm.default: ((0, -1), (1, -2)),
    aten.bmm.default: ((0, -1), (1, -2)),
    aten.addmm.default: ((1, -1), (2, -2)),
    aten.baddbmm.default: ((1, -1), (2, -2)),
    aten.mv.default: ((0, -1), (1, -1)),
    aten.convolution.default: ((0, None), (1, None)),
    aten.convolution_backward.default: ((0, None), (1, None), (2, None)),
}
FINE = ("rowwise", "rowwise_with_gw_hp")  # blocks of a weight share a scale, as whole tensors do


class Rounding(TorchDispatchMode):
    """Rounds the operands of matmuls. Scales are of rows under recipes with such, else of whole tensors."""

    def __init__(self, recipe: Any, headroom: float) -> None:
        super().__init__()
        name = recipe["base"] if isinstance(recipe, dict) else recipe
        self.fine, self.wide, self.headroom = name in FINE, name == "tensorwise", headroom

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERANDS:
            args = list(args)
            is_backward = torch._C._current_graph_task_id() != -1
            form = E5M2 if self.wide and is_backward else E4M3
            for index, dim in OPERANDS[func]:
                args[index] = round_to(args[index], form, dim if self.fine else None, self.headroom)
        return func(*args, **(kwargs or {}))


def round_to(x: Tensor, form: tuple[torch.dtype, float], dim: int | None, headroom: float) -> Tensor:
    """`x` rounded to a format and back, with a scale for each row along `dim`, or one for all."""
    if x.numel() == 0:
        return x
    dtype, largest = form
    wide = x.float()
    amax = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = torch.where(amax > 0, amax * headroom / largest, 1.0)
    return ((wide / scale).clamp(-largest, largest).to(dtype).float() * scale).to(x.dtype)


@contextlib.contextmanager
def rounding(model: nn.Module, options: dict[str, Any], headroom: float) -> Iterator[None]:
    """Eager steps of `model`, within this, round what `options` may round. headroom: see `fake_quantized`."""
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    narrow = any(p.dtype != torch.float32 for p in model.parameters())

    def pack(x: Tensor) -> Tensor:
        by_product = narrow and x.dtype == torch.float32  # statistics, an lse
        if not x.is_floating_point() or by_product or x.dim() < 2 or x.shape[-1] == 1:
            return x
        return x if x.untyped_storage().data_ptr() in held else round_to(x, E4M3, -1, headroom)

    with contextlib.ExitStack() as stack:
        stack.enter_context(Rounding(options.get("recipe", "mixed"), headroom))
        if options.get("save") != "bf16":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        yield
