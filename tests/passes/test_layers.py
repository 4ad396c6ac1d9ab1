"""Compiling a deep model: as many kinds of kernels as for a shallow one, and work that grows as its layers do."""

from __future__ import annotations

import cProfile
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.passes import pipeline
from fp8compile.passes.core.stages import Stage
from fp8compile.plan import store
from fp8compile.plan.rows import Kernel
from fp8compile.torch_hooks import partitioner

ROOT = Path(__file__).parents[2]

from llama import Block, LlamaConfig, Rotary  # noqa: E402


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(dim=128, n_layers=layers, n_heads=4, n_kv_heads=2, hidden=256)
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.rotary = Rotary(32, 64, 10_000.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


def compile_layers(layers: int) -> None:
    """Forward and backward of a stack of Llama blocks through all passes."""
    torch.compiler.reset()
    store.reset()
    torch.manual_seed(0)
    model = Layers(layers).bfloat16()
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    options = {"executor": "eager", "select": "all", "save_min_bytes": 0, "strict": True}
    torch.compile(model, backend="fp8", options=options)(x).sum().backward()


@dataclass(frozen=True)
class Work:
    """Of a stack: its generated kernels, and the Python calls of all passes, before and after the cut, and the cut."""

    kernels: Counter[str]
    calls: int


@pytest.fixture(scope="module")
def work() -> dict[int, Work]:
    """By the number of layers."""
    compile_layers(1)  # what is made once a process (the names of kernels, say) is made
    return {layers: measured(layers) for layers in (1, 2, 3)}


def measured(layers: int) -> Work:
    profile = cProfile.Profile(builtins=False)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(args[0], "stage", None) is Stage.CUT:  # which is a part of the partition
                return function(*args, **kwargs)
            return profile.runcall(function, *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pipeline, "run_stage"), (partitioner, "_partition")):
            patch.setattr(module, name, counted(getattr(module, name)))
        compile_layers(layers)
    return Work(kernels(), calls_in_our_code(profile))


def kernels() -> Counter[str]:
    """The names of the generated kernels, which are hashes of what they do, and how often each runs.

    Not of those that put together the amaxes or column sums of up to 16 layers: one for 16 of them, and one for what is
    left.
    """
    rows = fp8compile.last_compile().kernels
    return Counter(row.name for row in rows if not _only_puts_together(row))


def _only_puts_together(row: Kernel) -> bool:
    amaxes = all(space.startswith("1×") for space in row.space)
    return amaxes or all(re.fullmatch(r"row_sum( ×\d+)?", what) for what in row.operations)


def calls_in_our_code(profile: cProfile.Profile) -> int:
    places = tuple(str(ROOT / name) for name in ("passes", "fp8compile", "kernels"))
    calls = [(entry.code, entry.callcount) for entry in profile.getstats()]
    return sum(count for code, count in calls if isinstance(code, CodeType) and code.co_filename.startswith(places))


def test_more_layers_have_no_more_kinds_of_kernels(work: dict[int, Work]) -> None:
    few, many = work[2].kernels, work[3].kernels  # one layer is the first and the last
    assert sum(many.values()) > 1.4 * sum(few.values())
    assert set(many) == set(few)


def test_the_work_of_the_passes_grows_with_the_layers(work: dict[int, Work]) -> None:
    counts = [work[layers].calls for layers in (1, 2, 3)]
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert first > 0
    # A layer more costs what a layer more cost before, but for sums along the residual stream, which are followed to
    # its start from every layer: 3 % here. A list of all nodes for each matmul or region would be as much again.
    assert second < 1.06 * first, counts
