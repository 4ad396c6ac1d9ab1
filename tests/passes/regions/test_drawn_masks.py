"""A mask for backward is stored by the region that draws it, or drawn outside of regions and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from formed import formed
from torch import Tensor, fx
from torch.nn import functional

from fp8compile import ops
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.regions.region_graph import regions_of, spec_of

prims = torch.ops.prims
RATE = 0.25


def computed(a: Tensor, b: Tensor) -> Tensor:
    """What is dropped of: behind more matmuls than the mask."""
    return a @ b @ b.t() @ b


def mask(x: Tensor) -> Tensor:
    """Which elements stay, as Inductor has a dropout at this stage."""
    seed = prims.inductor_seed(x.device)
    return prims.inductor_random(list(x.shape), seed, "rand") > RATE


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = ops.scale(ops.amax(x, "row"), "e4m3")
    return ops.quantize(x, scale, "e4m3", "row"), scale


def saved(a: Tensor, b: Tensor) -> Any:
    """A dropout between two matmuls; backward is given its mask."""
    h = functional.relu(computed(a, b))
    keep = mask(h)
    return *cast(h * keep), keep


def saved_as_a_view(a: Tensor, b: Tensor) -> Any:
    payload, scale, keep = saved(a, b)
    return payload, scale, keep.view(-1, 16)


def with_a_residual(a: Tensor, b: Tensor) -> Any:
    """Others read the sum, which the region stores."""
    h = computed(a, b)
    keep = mask(h)
    x = h + h * keep
    payload, scale = cast(x * 2)
    return payload, scale, keep, x.cumsum(0)


def dropped_by_others_too(a: Tensor, b: Tensor) -> Any:
    """A sum over rows is no part of the region, and drops for itself."""
    h = computed(a, b)
    keep = mask(h)
    x = h * keep
    payload, scale = cast(x + x.cumsum(0))
    return payload, scale, keep


def read_by_others_too(a: Tensor, b: Tensor) -> Any:
    h = computed(a, b)
    keep = mask(h)
    return *cast(h * keep), keep, torch.cumsum(keep, 0)


def transposed(a: Tensor, b: Tensor) -> Any:
    """The mask lies as its numbers were drawn: a sequence before its batch, say."""
    h = computed(a, b)
    keep = mask(h.t()).t()
    return *cast(h * keep), keep


def two() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(32, 64, generator=generator).bfloat16(), torch.randn(64, 128, generator=generator).bfloat16()


def draws(graph: fx.Graph) -> int:
    """How often numbers are drawn: outside of regions, and within each."""
    outside = len(list(graph.find_nodes(op="call_function", target=prims.inductor_random.default)))
    specs = [spec_of(node)[0] for node in regions_of(graph)]
    return outside + sum(value.op == "random" for spec in specs for part in spec.parts for value in part.values)


@pytest.mark.parametrize(
    ("function", "outside"),
    [
        (saved, 0),
        (saved_as_a_view, 0),
        (with_a_residual, 0),
        (dropped_by_others_too, 1),
        (read_by_others_too, 1),
        (transposed, 1),
    ],
)
def test_numbers_are_drawn_once(function: Callable[..., Any], outside: int) -> None:
    graph = formed(function, *two()).graph
    assert len(regions_of(graph)) >= 1
    assert len(list(graph.find_nodes(op="call_function", target=prims.inductor_random.default))) == outside
    assert draws(graph) == 1


@pytest.mark.parametrize("function", [saved, saved_as_a_view, with_a_residual])
def test_the_mask_is_that_of_what_was_cast(function: Callable[..., Any]) -> None:
    module = formed(function, *two())
    payload, scale, keep, *_ = module(*two())
    keep = keep.view(32, 128)
    assert keep.dtype is torch.bool
    h = computed(*two())
    x = functional.relu(h) * keep if function is not with_a_residual else 2 * (h + h * keep)
    wanted, wanted_scale = cast(x)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(payload.float(), wanted.float())
    assert 0.6 < keep.float().mean() < 0.9


def test_what_is_stored_for_others_is_not_drawn_again() -> None:
    graph = formed(with_a_residual, *two()).graph
    (total,) = graph.find_nodes(op="call_function", target=aten.cumsum.default)
    (read,) = total.all_input_nodes
    while read.target is aten.view.default:
        (read,) = read.all_input_nodes
    (region,) = read.all_input_nodes
    assert region in regions_of(graph)
