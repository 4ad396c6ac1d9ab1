"""What is compiled once and run in two ways: with regions, and without (as `kernels="inductor"` has it)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import fx

from fp8compile import compile_graph
from fp8compile.torch_hooks.half_passes import LoweringPass


@dataclass
class Ways:
    """Makes two callables of each half: with regions, and as `kernels="inductor"` has it. fused: the first one runs."""

    make: Callable[..., Any]
    fused: bool = True

    def __call__(self, gm: fx.GraphModule, inputs: Any, *, lowering: LoweringPass, **settings: Any) -> Any:
        plain = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        without = replace(lowering, options=replace(lowering.options, kernels="inductor"))
        runs = [
            self.make(plain, inputs, lowering=without, **settings),
            self.make(gm, inputs, lowering=lowering, **settings),
        ]

        def run(args: list[Any]) -> Any:
            return runs[self.fused](args)

        vars(run)["_boxed_call"] = True
        return run


@contextlib.contextmanager
def two_ways() -> Iterator[Ways]:
    """What is compiled meanwhile runs with regions or without, cut in one way: the option is read after the cut."""
    with pytest.MonkeyPatch.context() as patch:
        ways = Ways(compile_graph.run_eagerly)
        patch.setattr(compile_graph, "run_eagerly", ways)
        yield ways
