"""Verify the graphs from which kernels are made: a half after each step that lowers it.

Beside the rules of `passes/core/verify.py`:

- the outputs have the shapes, dtypes and strides that they had, and none shows memory of an input that did not before
- a region reads tensors in the dtypes and strides for which its spec was made, inside of their memory; FP8 data only
  to multiply it by a scale
- a region writes every element of its buffers once, padding included (`kernels/check/coverage.py`)
- a launch has buffers of its own, or those that another launch has filled, which nothing else reads or writes
- nothing reads an input after it was overwritten
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx

from fp8compile import ops
from fp8compile.errors import VerificationError
from fp8compile.kernels.check.coverage import unwritten
from fp8compile.kernels.codegen.spec.region import Input, Part, Region, number_of
from fp8compile.passes.core.compilation import VIEWS, aten, is_tensor, value
from fp8compile.passes.core.marker_views import RegionCall
from fp8compile.passes.core.node_views import Copy, Getitem
from fp8compile.passes.core.run_passes import Check
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.core.stride_demands import Broken, broken_strides
from fp8compile.passes.core.verify import excerpt, verify
from fp8compile.passes.lower.launch_nodes import LAUNCH
from fp8compile.passes.regions.region_graph import spec_of

NEW = (aten.empty.memory_format, aten.full.default)  # buffers
SHOWS = {*VIEWS, aten.reshape.default, operator.getitem}
Outputs = list[tuple[Any, ...] | None]


def outputs_of(graph: fx.Graph) -> Outputs:
    """Return what readers of each output of `graph` rely on: dtype, shape, strides, and of which input it is a view."""
    outputs = graph.output_node().args[0]
    return [_described(a) for a in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def _described(node: Any) -> tuple[Any, ...] | None:
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return None
    x = value(node)
    strides = [_text(s) for s, n in zip(x.stride(), x.shape, strict=True) if str(n) not in ("0", "1")]
    owner = _owner(node)
    return str(x.dtype), [str(s) for s in x.shape], strides, owner.name if owner.op == "placeholder" else ""


def _text(stride: Any) -> str:
    """Return a stride as text. Of a tensor with elements Max(1, n) is n, and no stride of one without them is used."""
    if not isinstance(stride, torch.SymInt):
        return str(stride)
    return str(stride.node.expr.replace(_is_one_or_more, lambda most: sympy.Mul(*most.args)))


def _is_one_or_more(expression: sympy.Basic) -> bool:
    """Return True of Max(1, n), torch's own or sympy's."""
    return expression.func.__name__ == "Max" and len(expression.args) == 2 and sympy.S.One in expression.args


def _owner(node: fx.Node) -> fx.Node:
    """Return the node whose memory `node` shows."""
    while node.op == "call_function" and node.target in SHOWS and is_tensor(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def half_verifier(c: HalfGraph) -> Check:
    """Return the check of a half that becomes kernels: all rules of this module, against the graph as it is now.

    What a compiler has laid out otherwise by now it brings in order itself.
    """
    outputs, broken = outputs_of(c.graph), broken_strides(c.graph)
    return lambda step: verify_kernels(c.graph, step, outputs, broken)


def verify_kernels(graph: fx.Graph, stage: str, outputs: Outputs, broken: Broken = ()) -> None:
    """Check all rules of this module after `stage`; raises `VerificationError`.

    outputs, broken: of the graph before the first step; what a compiler has laid out otherwise it brings in order.
    """
    verify(graph, stage, broken=broken)
    tried: dict[Any, str] = {}
    for node in graph.nodes:
        why = _broken_rule(node, tried)
        if why:
            raise VerificationError(f"after {stage}: %{node.name}: {why}\n{excerpt(graph, node)}")
    now = outputs_of(graph)
    if len(now) != len(outputs):
        raise VerificationError(f"after {stage}: outputs changed in number, from {len(outputs)} to {len(now)}")
    for n, (before, after) in enumerate(zip(outputs, now, strict=True)):
        if before is not None and after is not None and not _agrees(before, after):
            raise VerificationError(f"after {stage}: output {n} changed from {before} to {after}")
    why = late_read(graph)
    if why:
        raise VerificationError(f"after {stage}: {why}")


def _agrees(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return before[:3] == after[:3] and after[3] in ("", before[3])


def _broken_rule(node: fx.Node, tried: dict[Any, str]) -> str:
    if node.target is ops.region:
        return _wrong_region(node, tried)
    if node.meta.get(LAUNCH):
        return _shared_buffer(node)
    return ""


# ---- regions --------------------------------------------------------------------------------------------------------


def _wrong_region(node: fx.Node, tried: dict[Any, str]) -> str:
    call = RegionCall(node)
    tensors, sizes = call.inputs, call.sizes
    region, schedule = spec_of(node)
    if len(tensors) != region.tensors or len(sizes) != len(region.sizes):
        return f"reads {len(tensors)} tensors and {len(sizes)} sizes, its spec {region.tensors} and {len(region.sizes)}"
    names = {name: _hint(size) for name, size in zip(region.sizes, sizes, strict=True)}
    inputs = [(value(t).dtype, tuple(map(hint, value(t).shape)), tuple(map(hint, value(t).stride()))) for t in tensors]
    key = (call.spec, call.schedule, tuple(names.values()), tuple(inputs))
    if key not in tried:  # layers are alike
        tried[key] = wrong_reads(region, inputs, names) or unwritten(region, schedule, names)
    return tried[key]


def _hint(size: Any) -> int:
    return hint(size.meta["val"] if isinstance(size, fx.Node) else size)


def wrong_reads(region: Region, inputs: Sequence[tuple[Any, ...]], sizes: Mapping[str, int]) -> str:
    """Return why `region` cannot read tensors of these (dtype, shape, strides); "" if it can."""
    for n, ((_, shape, strides), wanted) in enumerate(zip(inputs, region.strides, strict=False)):
        known = [number_of(s, sizes) for s in wanted]
        if any(a != b and size > 1 for a, b, size in zip(strides, known, shape, strict=True)):
            return f"tensor {n} has strides {list(strides)}, its spec was made for {known}"
    for part in region.parts:
        for n, read in enumerate(part.inputs):
            wrong = next(filter(None, (_wrong_read(read, t, inputs[t], sizes) for t in read.tensors)), "")
            if wrong:
                return wrong
            if "float8" in read.dtype and not _is_scaled(part, n):
                return f"reads FP8 data of tensor {read.tensor} without a scale"
    return ""


def _wrong_read(read: Input, tensor: int, given: tuple[Any, ...], sizes: Mapping[str, int]) -> str:
    """Return why `read` cannot read a tensor of this (dtype, shape, strides); "" if it can."""
    dtype, shape, strides = given
    if str(dtype) != f"torch.{read.dtype}":
        return f"tensor {tensor} is {dtype}, its spec reads {read.dtype}"
    room = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    if read.reach(sizes) > room:
        return f"reads element {read.reach(sizes) - 1} of tensor {tensor}, which has {room}"
    return ""


def _is_scaled(part: Part, read: int) -> bool:
    """Return True if all that is done with what input `read` loads is to multiply it."""
    loads = {i for i, v in enumerate(part.values) if v.op == "load" and v.params[0] == read}
    return all(v.op == "mul" for v in part.values if loads & set(v.args))


# ---- memory ---------------------------------------------------------------------------------------------------------


def _shared_buffer(launch: fx.Node) -> str:
    """Return why the buffers of a launch are not its own; "" if they are."""
    kwargs: Any = launch.kwargs["kwargs"]
    for name in cast("list[str]", launch.kwargs["tensors_to_clone"]):
        buffer = kwargs[name]
        if buffer.target not in NEW and not _is_result(buffer):
            return f"writes into %{buffer.name}, which is no buffer of its own"
        if len(buffer.users) != 1 or sum(x is buffer for x in kwargs.values()) != 1:
            return f"shares its buffer %{buffer.name} with {', '.join(f'%{u.name}' for u in buffer.users)}"
    return ""


def _is_result(node: fx.Node) -> bool:
    """Return True if `node` is what a launch left: a repair goes on with it, or the next matmul of few rows."""
    item = Getitem.of(node)
    return item is not None and bool(item.source.meta.get(LAUNCH))


def late_read(graph: fx.Graph) -> str:
    """Return which node reads an input of `graph` after a copy into it has overwritten it; "" if none does."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not aten.copy_.default and is_computed(node):
            for read in node.all_input_nodes:
                writer = written.get(_owner(read) if is_tensor(read) else read)
                if writer is not None and read is not writer:
                    return f"%{node.name} reads %{read.name} after %{writer.name} has overwritten it"
        elif (copy := Copy.of(node)) and (owner := _owner(copy.written)).op == "placeholder":
            written[owner] = node
    return ""


def is_computed(node: fx.Node) -> bool:
    """Return whether `node` reads elements of its inputs: a view does not."""
    return node.target not in SHOWS
