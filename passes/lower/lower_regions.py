"""Lower regions: on CUDA each becomes a launch of its generated kernel inside Inductor's own code.

Before      %r = fp8.region([%x], [], spec, schedule)                                   %q = %r[0]
After       %y0 = empty([…], e4m3)
            %k = triton_kernel_wrapper_functional(kernel, grid, {x0: %x, y0: %y0})       %q = %k["y0"]

`launch_nodes.py` says what Inductor makes of a launch.
A region that casts in one pass becomes two launches (`kernels/codegen/schedule/one_pass.py`); the second writes into
buffers of the first.

Buffers have at least one dimension: a scalar Inductor would fill with a kernel of its own.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fp8compile.empty_tensors import new_empty
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.emit.kernel import arguments
from fp8compile.kernels.codegen.schedule import one_pass
from fp8compile.kernels.codegen.schedule.one_pass import Launch
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.passes.core.compilation import getitems
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.lower.kernel_rows import kernel_rows
from fp8compile.passes.lower.known_accesses import declare
from fp8compile.passes.lower.launch_nodes import empty_node, launch_node
from fp8compile.passes.regions.region_graph import GraphEditor, regions_of, sizes_of, spec_of, tensors_of


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
    fakes: list[torch.Tensor] = list(node.meta["val"])
    pieces = [new_empty(fakes[0], [schedule.programs], torch.float32) for _ in range(one_pass.count_amaxes(region))]
    shapes, fakes = [*shapes, *([schedule.programs] for _ in pieces)], [*fakes, *pieces]
    results: dict[int, fx.Node] = {}  # of buffers, and behind them of pieces
    with graph.inserting_before(node):
        kernels = one_pass.launches(region, schedule)
        last = {n: kernel for kernel in kernels for n in kernel.buffers}
        for kernel in kernels:
            for n in kernel.buffers:
                if n not in results:
                    results[n] = empty_node(graph, fakes[n], shapes[n])
            # Until its last kernel a buffer has values of its own: of what seems to share memory with something that is
            # read later, Inductor makes a copy before it is written.
            values = [fakes[n] if last[n] is kernel else torch.empty_like(fakes[n]) for n in kernel.buffers]
            read = [*tensors_of(node), *(results.get(n) for n in range(len(shapes) - len(pieces), len(shapes)))]
            tensors, buffers = [read[t] for t in kernel.tensors], [results[n] for n in kernel.buffers]
            call = _launch(node, kernel, tensors, buffers, values)
            for y, n in enumerate(kernel.buffers):
                results[n] = graph.call_function(operator.getitem, (call, f"y{y}"))
                results[n].meta = {**node.meta, "val": values[y]}
    for index, item in getitems(node).items():
        results[index].meta = dict(item.meta)
        item.replace_all_uses_with(results[index])
        graph.erase_node(item)
    graph.erase_node(node)
    for result in results.values():
        if not result.users:
            graph.erase_node(result)


def _launch(
    node: fx.Node, kernel: Launch, read: list[Any], written: list[fx.Node], values: list[torch.Tensor]
) -> fx.Node:
    """Return the launch of one kernel of the region `node`, which makes `values` of the buffers `written`."""
    names = arguments(kernel.region)
    outputs = [name for name in names if name.startswith("y")]
    given = dict(zip(names, [*read, *written, *sizes_of(node)], strict=True))
    made = dict(zip(outputs, values, strict=True))
    return launch_node(node, _kernel(kernel.region, kernel.schedule), (kernel.schedule.programs, 1, 1), given, made)


@functools.lru_cache(maxsize=4096)
def _kernel(region: Region, schedule: Schedule) -> Any:
    """Return the kernel with its number of warps: Inductor takes that from an autotuner with a single configuration."""
    import triton  # here, so that a machine without a GPU does not need it

    kernel = generated.kernel_of(region, schedule, "cuda")
    names = arguments(region)
    declare(kernel, [n for n in names if n.startswith("x")], [n for n in names if n.startswith("y")])
    return triton.autotune(configs=[triton.Config({}, num_warps=schedule.warps)], key=[])(kernel)
