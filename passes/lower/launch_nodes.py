"""Launches as nodes: how a Triton kernel of ours stands in a graph for Inductor.

    %k = triton_kernel_wrapper_functional(kernel, grid, {x0: %x, y0: %y0})        %q = %k["y0"]

This is how torch itself represents kernels that users call in compiled code. Inductor plans the memory of the buffers,
launches the kernel inline and shows its source; CUDA graphs capture it. It hands the kernel to its pool of compiling
processes like one of its own, with a single configuration. It would keep the order of strides only; `eager_input_vals`
makes it keep the strides themselves, which are written into the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import (  # torch's only form for a Triton kernel in a graph
    kernel_side_table,
    triton_kernel_wrapper_functional,
)

from fp8compile.passes.core.compilation import aten

LAUNCH = "fp8_launch"  # in the metadata of a launch


def launch_node(
    like: fx.Node,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Mapping[str, Any],
    written: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Return a launch, where its graph inserts. kernel: an autotuner of one configuration; arguments: nodes and sizes,
    by name; written: values of the results; constants: what the kernel is compiled for; like: whose origin it has."""
    launch: dict[str, Any] = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(dict(constants or {})),
        "grid": [grid],
        "tma_descriptor_metadata": {},
        "kwargs": dict(arguments),
        "tensors_to_clone": list(written),
    }
    call = like.graph.call_function(triton_kernel_wrapper_functional, (), launch)
    call.meta = {**like.meta, LAUNCH: True, "val": dict(written)}
    call.meta["eager_input_vals"] = fx.map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
    return call


def empty_node(graph: fx.Graph, fake: torch.Tensor, shape: Sequence[Any]) -> fx.Node:
    """Return a buffer of this shape, like `fake`, where `graph` inserts."""
    kwargs = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
    node = graph.call_function(aten.empty.memory_format, (list(shape),), kwargs)
    node.meta["val"] = torch.empty_like(fake)
    return node
