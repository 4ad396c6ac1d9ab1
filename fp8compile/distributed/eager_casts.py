"""Casts outside of compiled graphs: one generated kernel each on a GPU, the reference on a CPU.

A graph of the one cast goes through the passes that make kernels of casts in models, so that a weight which is cast
before it is gathered has the bits that it would have had in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode  # graphs are made without data

from fp8compile import ops
from fp8compile.formats import FORMATS
from fp8compile.kernels.reference import markers
from fp8compile.passes.regions.combine_regions import combine_regions
from fp8compile.passes.regions.form_regions import form_regions


def quantize(x: Tensor, scale: Tensor, format: str, granularity: str) -> Tensor:
    """Return `fp8::quantize` of x [R, C]: FP8 data in `format` of the same shape."""
    if not x.numel():
        return x.new_empty(x.shape, dtype=FORMATS[format].dtype)
    if x.device.type == "cpu":
        return markers.quantize(x, scale, format, granularity)
    return _scaled_kernel(Like.of(x), Like.of(scale), format, granularity)(x.contiguous(), scale.contiguous())[0]


def quantize_groups(x: Tensor, format: str, granularity: str = "group(128)") -> tuple[Tensor, Tensor]:
    """Return (FP8 data, scales) of x [R, C], each group by its own amax."""
    if x.device.type == "cpu" or not x.numel():
        scale = markers.scale(markers.amax(x, granularity), format)
        return markers.quantize(x, scale, format, granularity), scale
    data, scale = _groups_kernel(Like.of(x), format, granularity)(x.contiguous())
    return data, scale


@dataclass(frozen=True)
class Like:
    """The kind of contiguous tensors that a kernel is made for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(x: Tensor) -> Like:
        """Return the kind of `x`."""
        return Like(tuple(x.shape), x.dtype, str(x.device))

    def empty(self) -> Tensor:
        """Return a tensor of this kind, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


Kernel = Callable[..., tuple[Tensor, ...]]


@functools.lru_cache(maxsize=1024)
def _scaled_kernel(x: Like, scale: Like, format: str, granularity: str) -> Kernel:
    return kernel(lambda emit, x, scale: [emit(ops.quantize, x, scale, format, granularity)], x, scale)


@functools.lru_cache(maxsize=1024)
def _groups_kernel(x: Like, format: str, granularity: str) -> Kernel:
    def body(emit: Callable[..., fx.Node], x: fx.Node) -> list[fx.Node]:
        scale = emit(ops.scale, emit(ops.amax, x, granularity), format)
        return [emit(ops.quantize, x, scale, format, granularity), scale]

    return kernel(body, x)


def kernel(body: Callable[..., list[fx.Node]], *inputs: Like) -> Kernel:
    """Return a function from tensors like `inputs` to what `body(emit, *nodes)` writes, in generated kernels."""
    graph = fx.Graph()

    def emit(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    with FakeTensorMode():
        nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
        for node, like in zip(nodes, inputs, strict=True):
            node.meta["val"] = like.empty()
        graph.output(tuple(body(emit, *nodes)))
        form_regions(graph)
        combine_regions(graph)
    return fx.GraphModule(torch.nn.Module(), graph)
