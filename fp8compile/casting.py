"""Casts outside of compiled graphs: one generated kernel each on a GPU, the reference on a CPU.

A graph of the one cast goes through the passes that make kernels of casts in models, so that a weight which is cast
before it is gathered has the bits that it would have had in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode  # graphs are made without data

from fp8compile import ops
from fp8compile.formats import FORMATS
from fp8compile.kernels import reference
from fp8compile.passes.combine_regions import combine_regions
from fp8compile.passes.form_regions import form_regions


def quantize(x: Tensor, scale: Tensor, format: str, granularity: str) -> Tensor:
    """`fp8::quantize` of x [R, C]: FP8 data in `format` of the same shape."""
    if not x.numel():
        return x.new_empty(x.shape, dtype=FORMATS[format].dtype)
    if x.device.type == "cpu":
        return reference.quantize(x, scale, format, granularity)
    return kernel(tuple(x.shape), x.dtype, tuple(scale.shape), format, granularity, str(x.device))(x, scale)


@functools.lru_cache(maxsize=1024)
def kernel(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale_shape: tuple[int, ...],
    format: str,
    granularity: str,
    device: str,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function (contiguous x, scale) → data, for these shapes."""
    graph = fx.Graph()
    with FakeTensorMode():
        made = (
            ("x", torch.empty(shape, dtype=dtype, device=device)),
            ("scale", torch.empty(scale_shape, device=device)),
        )
        inputs = [graph.placeholder(name) for name, _ in made]
        for node, (_, value) in zip(inputs, made, strict=True):
            node.meta["val"] = value
        cast = graph.call_function(ops.quantize, (*inputs, format, granularity))
        cast.meta["val"] = ops.quantize(*(value for _, value in made), format, granularity)
        graph.output(cast)
        form_regions(graph)
        combine_regions(graph)
    return fx.GraphModule(torch.nn.Module(), graph)
