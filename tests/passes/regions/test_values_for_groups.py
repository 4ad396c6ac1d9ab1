"""A value that only casts of groups read is stored by the region that loads what it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formed import formed
from torch import Tensor, fx

from fp8compile import ops
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.regions.region_graph import regions_of

ROWS, WIDE, NARROW = 128, 256, 64


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    gate, up = (torch.randn(ROWS, WIDE).bfloat16() for _ in range(2))
    dy, weight = torch.randn(ROWS, NARROW).bfloat16(), torch.randn(NARROW, WIDE).bfloat16()
    return [gate, up, dy, weight, torch.tensor([50, 128], dtype=torch.int32)]


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = ops.scale(ops.amax(x, "row"), "e4m3")
    return ops.quantize(x, scale, "e4m3", "row"), scale


def groups(x: Tensor, offs: Tensor) -> list[Tensor]:
    return list(ops.grouped_cast(x, offs, "e4m3"))


def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, weight: Tensor, offs: Tensor) -> list[Tensor]:
    """The product, which is computed again for grad_weight, and the gradients of both factors."""
    dh = dy @ weight
    s = torch.sigmoid(gate)
    return [*groups(F.silu(gate) * up, offs), *cast(dh * up * s * (1 + gate * (1 - s))), *cast(dh * F.silu(gate))]


def read_elsewhere(gate: Tensor, up: Tensor, dy: Tensor, weight: Tensor, offs: Tensor) -> list[Tensor]:
    """A matmul reads the product, too."""
    product = F.silu(gate) * up
    dh = dy @ weight
    return [*groups(product, offs), product @ weight.T, *cast(dh * up), *cast(dh * F.silu(gate))]


def needed_before(gate: Tensor, up: Tensor, dy: Tensor, weight: Tensor, offs: Tensor) -> list[Tensor]:
    """The gradient is computed of what is made of the cast."""
    data, scale, _ = groups(F.silu(gate) * up, offs)
    dh = dy @ weight + data.float().sum().bfloat16() * scale.sum()
    return [*cast(dh * up), *cast(dh * F.silu(gate))]


def of_other_tensors(gate: Tensor, up: Tensor, dy: Tensor, weight: Tensor, offs: Tensor) -> list[Tensor]:
    """The region of the gradients does not load one of the factors."""
    return [*groups(F.silu(gate) * up, offs), *cast((dy @ weight) * up)]


def shares_a_region(graph: fx.Graph) -> bool:
    (node,) = graph.find_nodes(op="call_function", target=ops.grouped_cast)
    source = first_input(node)
    return source.op == "call_function" and source.all_input_nodes[0] in regions_of(graph)


@pytest.mark.parametrize(
    ("function", "shares"),
    [(swiglu_backward, True), (read_elsewhere, False), (needed_before, False), (of_other_tensors, False)],
)
def test_which_values_are_stored_by_a_later_region(function: Any, shares: bool) -> None:
    given = inputs()
    module = formed(function, *given)
    assert shares_a_region(module.graph) == shares
    for a, b in zip(module(*given), function(*given), strict=True):
        exact = a.dtype.itemsize > 1 and a.dtype != torch.int32
        a, b = a.float(), b.float()
        assert ((a - b).norm() / b.norm()).item() < (0.01 if exact else 0.05)
