"""Graphs of regions: what a function becomes that casts, after regions were formed and combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.passes.regions.combine_regions import combine_regions
from fp8compile.passes.regions.form_regions import form_regions


def formed(
    function: Callable[..., Any], *inputs: Tensor, mode: str = "fake", in_one_pass: bool = False
) -> fx.GraphModule:
    """The module of `function`; with `in_one_pass`, as in backward."""
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    module.graph.eliminate_dead_code()
    form_regions(module.graph)
    combine_regions(module.graph, in_one_pass)
    module.graph.lint()
    module.recompile()
    return module


def of_any_rows(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph of `function`, and the same with regions; the first input has any number of rows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    first = mode.from_tensor(inputs[0], symbolic_context=rows, source=ConstantSource("x"))
    fakes = [first, *map(mode.from_tensor, inputs[1:])]
    plain, module = (make_fx(function, decomposition_table=select_decomp_table())(*fakes) for _ in range(2))
    form_regions(module.graph)
    combine_regions(module.graph)
    module.graph.lint()
    module.recompile()
    return plain, module
