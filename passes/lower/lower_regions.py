"""Lower regions: on CUDA each becomes a launch of its generated kernel inside Inductor's own code.

Before      %r = fp8.region([%x], [], spec, schedule)                                   %q = %r[0]
After       %y0 = empty([…], e4m3)
            %k = triton_kernel_wrapper_functional(kernel, grid, {x0: %x, y0: %y0})       %q = %k["y0"]

Inductor then plans the memory of the buffers, launches the kernel inline and shows its source; CUDA graphs capture it.
The wrapper is how torch itself represents kernels that users call in compiled code. Inductor would keep the order of
strides only; `eager_input_vals` makes it keep the strides themselves, which are written into the kernel.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import (  # torch's only form for a Triton kernel in a graph
    kernel_side_table,
    triton_kernel_wrapper_functional,
)

from fp8compile.kernels.codegen import emit, generated
from fp8compile.kernels.codegen.schedule import Schedule
from fp8compile.kernels.codegen.spec import Region
from fp8compile.passes.core.compilation import aten, getitems
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.lower.kernel_rows import kernel_rows
from fp8compile.passes.lower.known_accesses import analyse_once
from fp8compile.passes.regions.region_graph import GraphEditor, regions_of, sizes_of, spec_of, tensors_of

LAUNCH = "fp8_launch"  # in the metadata of a region that has become a launch


def run(c: HalfGraph) -> None:
    """Replace the regions of a half by launches, and note the kernels: the graph says no more of them afterwards."""
    c.lowered.kernels = kernel_rows(c.graph, c.half)
    lower_regions(c.graph)


def lower_regions(graph: fx.Graph) -> None:
    """Replace every region of `graph` by a launch."""
    editor = GraphEditor(graph)
    regions = regions_of(graph)
    shapes = [[[editor.size_node(s, node) for s in fake.shape] for fake in node.meta["val"]] for node in regions]
    for node, of_buffers in zip(regions, shapes, strict=True):
        _lower(graph, node, of_buffers)


def _lower(graph: fx.Graph, node: fx.Node, shapes: list[list[Any]]) -> None:
    region, schedule = spec_of(node)
    fakes: list[torch.Tensor] = node.meta["val"]
    names = emit.arguments(region)
    outputs = [name for name in names if name.startswith("y")]
    with graph.inserting_before(node):
        empties = [_empty(graph, fake, shape) for fake, shape in zip(fakes, shapes, strict=True)]
        kwargs = dict(zip(names, [*tensors_of(node), *empties, *sizes_of(node)], strict=True))
        launch: dict[str, Any] = {
            "kernel_idx": kernel_side_table.add_kernel(_kernel(region, schedule)),
            "constant_args_idx": kernel_side_table.add_constant_args({}),
            "grid": [(schedule.programs, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": kwargs,
        }
        call = graph.call_function(triton_kernel_wrapper_functional, (), {**launch, "tensors_to_clone": outputs})
        call.meta = {**node.meta, LAUNCH: True, "val": dict(zip(outputs, fakes, strict=True))}
        call.meta["eager_input_vals"] = fx.map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
        for index, item in getitems(node).items():
            out = graph.call_function(operator.getitem, (call, outputs[index]))
            out.meta = dict(item.meta)
            item.replace_all_uses_with(out)
            graph.erase_node(item)
    graph.erase_node(node)


def _empty(graph: fx.Graph, fake: torch.Tensor, shape: list[Any]) -> fx.Node:
    kwargs = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
    node = graph.call_function(aten.empty.memory_format, (shape,), kwargs)
    node.meta["val"] = fake
    return node


@functools.lru_cache(maxsize=4096)
def _kernel(region: Region, schedule: Schedule) -> Any:
    """Return the kernel with its number of warps: Inductor takes that from an autotuner with a single configuration."""
    import triton  # here, so that a machine without a GPU does not need it

    kernel = generated.kernel_of(region, schedule, "cuda")
    analyse_once(kernel)
    return triton.autotune(configs=[triton.Config({}, num_warps=schedule.warps)], key=[])(kernel)
