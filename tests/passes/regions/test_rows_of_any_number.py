"""Rows whose number is known when they come: concatenated payloads in one buffer, scales of groups beside payloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from formed import of_any_rows
from torch import Tensor

from fp8compile import ops
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.regions.region_graph import regions_of, sizes_of, spec_of

ROWS, COLS = 40, 64


def concatenated(dim: int, transpose: bool, multiples: tuple[int, int]) -> Callable[..., Any]:
    def run(x: Tensor, s: Tensor) -> Any:
        parts = [ops.quantize(y, s, "e4m3", "tensor", transpose, *multiples) for y in (x.sin(), x * 2, x.abs())]
        return (torch.cat(parts, dim),)

    return run


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, COLS, generator=torch.Generator().manual_seed(1)), torch.tensor(0.01)


LAYOUTS = {  # (dimension of the concatenation, transposed, multiples to which zeros are added)
    "transposed": (0, True, (1, 16)),
    "transposed without zeros": (0, True, (1, 1)),
    "as it lies": (1, False, (1, 1)),
    "rows with zeros": (1, False, (16, 1)),
}


def groups(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept for backward."""
    scale = ops.scale(ops.amax(x * s, "group(16)"), "e4m3")
    return ops.quantize(x * s, scale, "e4m3", "group(16)"), scale


FUNCTIONS = {name: concatenated(*layout) for name, layout in LAYOUTS.items()} | {"groups": groups}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_region_computes_all(name: str) -> None:
    plain, module = of_any_rows(FUNCTIONS[name], *inputs(ROWS))
    assert not module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert not any(node.target in ops.CASTS for node in module.graph.nodes)
    assert len(regions_of(module.graph)) == 1
    for rows in (ROWS, 16, 7, 61):
        for expected, found in zip(plain(*inputs(rows)), module(*inputs(rows)), strict=True):
            assert found.shape == expected.shape
            assert torch.equal(found.float(), expected.float())


def test_parts_along_which_zeros_are_added_are_copied() -> None:
    """Between the parts are the zeros of each."""
    plain, module = of_any_rows(concatenated(1, False, (1, 128)), *inputs(ROWS))
    assert module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert torch.equal(plain(*inputs(9))[0].float(), module(*inputs(9))[0].float())


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu runs kernels compiled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpreter.prepare()
    for rows in (ROWS, 1000):
        _, module = of_any_rows(FUNCTIONS[name], *inputs(rows))
        (node,) = regions_of(module.graph)
        region, schedule = spec_of(node)
        if name == "transposed":
            assert any(t.packed_transpose for t in schedule.tilings), "rows are rounded up to words"
        sizes = [hint(size.meta["val"]) for size in sizes_of(node)]
        given = check_kernel.random_inputs(region, sizes, 5, "cpu")
        kernel = generated.kernel_of(region, schedule, "interpreter")
        assert check_kernel.check(kernel, region, schedule, given, sizes) == []
