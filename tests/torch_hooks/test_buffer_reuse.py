"""Freed buffers are used again, but large ones are not held for it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import AllocateLine
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from fp8compile import host_copies
from fp8compile.torch_hooks.inductor.buffer_reuse import SMALL
from fp8compile.torch_hooks.inductor.our_graph import compiling_ours

# What the first product leaves is free three matmuls before the fourth could take it. The last one makes the peak.
LARGE = (1024, 1024, 8, 16, 1024, 1024)
LITTLE = tuple(min(size, 64) for size in LARGE)
EQUAL = (1024,) * 5  # each product takes the place of the one before the last, which has just been freed


@torch.library.custom_op("fp8compile_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def products(x: Tensor, weights: list[Tensor]) -> Tensor:
    for w in weights:
        x = x @ w
    return x


def around_an_operator(x: Tensor, weights: list[Tensor]) -> Tensor:
    for n, w in enumerate(weights):
        x = x @ w
        if n == 1:
            x = twice(x)
    return x


def reused(step: Callable[..., Tensor], sizes: tuple[int, ...], has_fp8: bool) -> bool:
    """Return True if Inductor's code uses a buffer again; its results are compared to those of eager."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes[0], sizes[0], generator=generator)
    weights = [torch.randn(k, n, generator=generator) / k**0.5 for k, n in itertools.pairwise(sizes)]
    torch.compiler.reset()
    with torch.no_grad(), inductor_config.patch(inplace_buffers=False, force_disable_caches=True):
        with compiling_ours(has_fp8):
            result, (code,) = run_and_get_code(torch.compile(step), x, weights)
        torch.testing.assert_close(result, step(x, weights), rtol=1e-3, atol=1e-3)
    return "# reuse" in code


def test_sizes_lie_on_both_sides() -> None:
    assert 4 * LITTLE[0] ** 2 <= SMALL < 4 * LARGE[0] ** 2


@pytest.mark.parametrize(
    ("step", "sizes", "expected"),
    [
        (products, LARGE, False),
        (products, EQUAL, True),
        (products, LITTLE, True),
        (around_an_operator, LARGE, False),
        (around_an_operator, LITTLE, True),
    ],
)
def test_a_large_buffer_is_not_held(step: Callable[..., Tensor], sizes: tuple[int, ...], expected: bool) -> None:
    assert reused(step, sizes, has_fp8=True) == expected


@pytest.mark.parametrize(("size", "expected"), [(0, False), (SMALL, True), (SMALL + 1, False)])
def test_sizes_that_only_the_data_knows_are_large(size: int, expected: bool) -> None:
    line, freed = (types.SimpleNamespace(scheduler_node_index=index) for index in (7, 3))
    with compiling_ours(), V.set_graph_handler(types.SimpleNamespace(operations=[])):  # type: ignore[arg-type]
        assert AllocateLine.should_reuse_buffer(line, freed, size) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["copied", "another"])
def test_what_is_being_copied_to_the_host_is_not_used_again(name: str) -> None:
    """A copy of it may have been made for the copy to the host alone, so that nothing else keeps it until that ends."""
    copy = types.SimpleNamespace(op_overload=host_copies.to_host, inputs=[buffer("copied")])
    line = types.SimpleNamespace(scheduler_node_index=4, wrapper=None)
    freed = types.SimpleNamespace(scheduler_node_index=3, node=buffer(name))
    graph: Any = types.SimpleNamespace(operations=[types.SimpleNamespace(), copy])
    with compiling_ours(), V.set_graph_handler(graph):
        assert AllocateLine.should_reuse_buffer(line, freed, SMALL) == (name != "copied")  # type: ignore[arg-type]


def buffer(name: str) -> Any:
    return types.SimpleNamespace(get_name=lambda: name)


@pytest.mark.parametrize("sizes", [LARGE, LITTLE])
def test_other_graphs_are_compiled_as_ever(sizes: tuple[int, ...]) -> None:
    assert reused(around_an_operator, sizes, has_fp8=False)
