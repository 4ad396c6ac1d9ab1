"""Estimate how long matmuls, attention and convolutions take on a device: for their operations, or for their bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from fp8compile import ops
from fp8compile.devices import TABLE, Device
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.matmul_views import GroupedMM
from fp8compile.passes.core.sizes import count, hint

IN_FP8 = (ops.scaled_mm, aten._scaled_mm.default)


def library_seconds(node: fx.Node, device: Device) -> float:
    """Return the seconds that `node`, a kernel of a library, takes, about; at an H200's rates where none are known."""
    rates = device if device.bf16 else TABLE["H200"]
    moved = sum(count(value(n).shape) * value(n).dtype.itemsize for n in (node, *node.all_input_nodes) if is_tensor(n))
    rate = rates.fp8_row if node.target in IN_FP8 else rates.bf16
    return max(_operations(node) / (rate * 1e12), moved / (rates.casts * 1e12))


def _operations(node: fx.Node) -> float:
    if (matmul := ScaledMM.of(node)) is not None:
        return 2.0 * count(value(matmul.a).shape) * count(value(matmul.b).shape[-2:-1])
    if (
        grouped := GroupedMM.of(node)
    ) is not None:  # torch's table has none; whatever its groups, a row meets one matrix
        return 2.0 * count(value(grouped.left).shape) * count(value(grouped.right).shape[-1:])
    assert isinstance(node.target, torch._ops.OpOverload)
    if operators.is_attention(node.target):
        given = operators.arguments(node)
        return _of_attention(*(value(given[name]) for name in ("query", "key", "value")))
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0.0
    given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs, out = tree_map(_of_known_size, (*given, node.meta["val"]))  # type: ignore[misc]
    return float(formula(*args, **kwargs, out_val=out))


def _of_known_size(x: Any) -> Any:
    """Return a tensor without data, or a number, in place of one whose sizes are symbols: as they were when traced."""
    if isinstance(x, torch.Tensor):
        return torch.empty([hint(n) for n in x.shape], dtype=x.dtype, device="meta")
    return hint(x) if isinstance(x, torch.SymInt) else x


def _of_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Return the operations of two matmuls for each head of q; torch's formula knows no heads that share k and v."""
    return 2.0 * count(q.shape[:-1]) * count(k.shape[-2:-1]) * (count(q.shape[-1:]) + count(v.shape[-1:]))
