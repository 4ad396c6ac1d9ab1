"""Host costs: how long a step keeps its host, beside its GPU. A short step waits for the host.

    step    the longer of both: the host launches ahead while the GPU works
    GPU     matmuls, convolutions and attention by their FLOPs, the rest by what fused kernels read and write; of
            training, what AdamW reads and writes of the parameters
    host    `HOST` microseconds a launch, with the buffer that it writes, and `HALF` for forward and for backward,
            whatever they launch; of training, `OUTSIDE` for the loss and the optimizer; FP8 adds `ADDED` for a matmul:
            casts, amaxes, transposed copies, scales, and what is unpacked for backward

Fused kernels are counted as Inductor makes them, roughly: what is computed element by element or along rows, connected,
with no library's kernel and no sum over rows in between, is one; so is each sum over rows, with what it sums.

From fifteen models on an H100 with torch 2.11 (`benchmarks/training/paired_steps.py`): forward and backward of
`torch.compile` took the host 0.74 to 1.29 of this estimate in BF16, before it had `HALF`, which is what an MLP of
four layers on one row needed beside its launches (1.4 ms, where launches are 0.8). `OUTSIDE` is what steps of two
MLPs took besides (0.7 to 1.0 ms), with a loss outside of the graph and torch's fused AdamW. Ours took 0.79 to 0.91 of
the estimate with nothing in FP8, and in FP8 between -37 and 27 microseconds a matmul more, so `ADDED` is no less than
what was seen. The host had sixteen cores a GPU, of a server that others use as well. On a faster one gains are left in
steps that stay in BF16 (ViT-B, MLP-Mixer); priced for a fast one, a step was 0.8 times as fast as in BF16. A host that
falls behind becomes slower still, as a launch onto an idle GPU takes it longer. So a gain of less than `LEAST_GAIN`
is left where a slow host would be later than the GPU. A CUDA graph leaves the host out: then times on the GPU are
compared, and in such short steps a gain of less than `LEAST_GAIN` is no more than their error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether a CUDA graph or C++ launches
from torch.utils import _pytree as pytree

from fp8compile.devices import Device
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import VIEWS, Compilation, base, is_tangent, is_tensor, value
from fp8compile.passes.core.matmul_node import CONVOLUTION, MatmulNode
from fp8compile.passes.core.node_views import Getitem, argument
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.matmul.matmul_costs import Costs, Timed, alone_in_bf16, merged_as

# microseconds of a host: a launch of each kind, a gradient that autograd takes, and what FP8 adds for a matmul
HOST = {"matmul": 40.0, "convolution": 60.0, "attention": 120.0, "other": 50.0, "fused": 22.0, "gradient": 8.0}
HALF = 350.0  # guards, wrappers, autograd's own node
OUTSIDE = 700.0  # a loss that is not compiled, the optimizer, gradients that are given back
UPDATES = 7  # AdamW: a parameter, its gradient and two states are read, and all but the gradient are written
ADDED = 30.0
LEAST_GAIN = 0.015  # of a step
SLOW_HOST = 1.5  # times slower than that of these figures
SHARE_OF_RATE = {"convolution": 0.5, "attention": 0.5}  # of the device's BF16 FLOP/s
WITH_BIAS = 0.15  # the same of the attention that takes any bias, which is slower


@dataclass(frozen=True)
class Times:
    """Hold how long a graph keeps its GPU and its host, in milliseconds; unpacking: so much of its GPU's time."""

    gpu: float
    host: float
    unpacking: float = 0.0

    @property
    def step(self) -> float:
        """The longer of both."""
        return max(self.gpu, self.host)

    @property
    def waits(self) -> bool:
        """Return True if a slow host would be later than the GPU."""
        return SLOW_HOST * self.host > self.gpu


def times_in_bf16(
    graph: fx.Graph, matmuls: Iterable[MatmulNode], device: Device, kept: Collection[fx.Node] = (), updated: int = 0
) -> Times:
    """Return the times without FP8 of a step with this graph.

    matmuls: all of it, convolutions among them, which are counted for their nodes; kept: as of `Costs`; updated: bytes
    of the parameters that it computes gradients of.
    """
    gpu = sum(alone_in_bf16(m, device, kept) for m in matmuls if m.kind != CONVOLUTION)
    gpu += UPDATES * updated / (device.casts * 1e9)
    host = 2 * HALF + OUTSIDE if any(map(is_tangent, graph.nodes)) else HALF
    for node in graph.nodes:
        kind = _kind(node)
        if kind in SHARE_OF_RATE:
            share = WITH_BIAS if "efficient_attention" in operators.name_of(node.target) else SHARE_OF_RATE[kind]
            flops = _attention_flops(node) if kind == "attention" else _convolution_flops(node)
            gpu += flops * 1e-9 / (device.bf16 * share)
        if kind not in ("", "fused"):
            gpu += device.launch * 1e-3
            host += HOST[kind]
    kernels = _fused_kernels(graph)
    gpu += sum(max(moved / (device.casts * 1e9), device.launch * 1e-3) for moved in kernels)
    host += HOST["fused"] * len(kernels) + HOST["gradient"] * _gradients(graph)
    return Times(gpu, host * 1e-3)


def updated_bytes(c: Compilation) -> int:
    """Return how many bytes the parameters take that a joint graph computes gradients of."""
    inputs = [node for node in c.graph.find_nodes(op="placeholder") if node.name in c.inputs]
    outputs = pytree.tree_leaves(c.graph.output_node().args)  # a gradient of each input, or None, comes last
    pairs = zip(reversed(inputs), reversed(outputs), strict=False)
    return sum(_bytes(node) for node, gradient in pairs if gradient is not None and c.inputs[node.name].is_parameter)


def times_in_fp8(bf16: Times, chosen: Iterable[Timed], costs: Costs) -> Times:
    """Return the times with these matmuls in FP8, and what others of backward read unpacked; matmuls that become one
    count once for the host."""
    times = [(matmul, *costs.milliseconds(matmul, role)) for matmul, role in chosen]
    in_fp8 = {matmul for matmul, _, _ in times}
    unpacking = sum(x.milliseconds(in_fp8) for x in costs.unpacked)
    launched = {merged_as(matmul) or matmul for matmul, _, _ in times}
    saved = sum(before - after for _, before, after in times)
    return Times(bf16.gpu - saved + unpacking, bf16.host + ADDED * len(launched) * 1e-3, unpacking)


def is_shorter(fp8: Times, bf16: Times, waits_for_host: bool = True) -> bool:
    """Return True if a step is shorter in FP8: by `LEAST_GAIN` of it, where a slow host would be later than the GPU.

    waits_for_host: False for a step that a CUDA graph launches.
    """
    after, before = (fp8.step, bf16.step) if waits_for_host else (fp8.gpu, bf16.gpu)
    return after < before * (1 - (LEAST_GAIN if fp8.waits else 0))


def host_launches() -> bool:
    """Return False if a CUDA graph or C++ launches the kernels of what is compiled now."""
    return not (inductor_config.triton.cudagraphs or inductor_config.cpp_wrapper)


def _kind(node: fx.Node) -> str:
    """Return what launches `node`: a key of HOST; "" where nothing does."""
    if node.op != "call_function" or node.target in VIEWS or Getitem.of(node) is not None:
        return ""
    name = operators.name_of(node.target)
    if name in operators.MATMULS:
        return "matmul"
    if name in operators.CONVOLUTIONS:
        return "convolution"
    if name in operators.ATTENTIONS:
        return "attention"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "other" if isinstance(node.target, torch._ops.HigherOrderOperator) else ""  # sizes are Python's
    return "fused" if node.target.namespace in ("aten", "prims") else "other"


def _attention_flops(node: fx.Node) -> int:
    """Return the FLOPs of an attention, forward or backward, as if nothing were masked; 0 of one with another form."""
    try:
        query, key, of_value = (_sizes(argument(node, name)) for name in ("query", "key", "value"))
    except (AttributeError, KeyError):  # no operator, or of other arguments
        return 0
    if not len(query) == len(key) == len(of_value) == 4:
        return 0
    batch, heads, rows, width = query
    passes = 2.5 if "backward" in operators.name_of(node.target) else 1.0
    return int(passes * 2 * batch * heads * rows * key[2] * (width + of_value[3]))


def _convolution_flops(node: fx.Node) -> int:
    """Return the FLOPs of a convolution: an output or more for each of its gradients, a weight's elements each."""
    tensors = [_sizes(i) for i in node.all_input_nodes if is_tensor(i)]
    is_backward = "backward" in operators.name_of(node.target)  # it reads the gradient, before input and weight
    if len(tensors) < 2 + is_backward:
        return 0
    weight = tensors[1 + is_backward]
    out = tensors[0] if is_backward else _sizes(node)
    each = 2 * prod(weight[1:])
    return int((2 if is_backward else 1) * each * prod(out))


def _sizes(node: fx.Node) -> tuple[int, ...]:
    return tuple(hint(s) for s in value(node).shape)


def _fused_kernels(graph: fx.Graph) -> list[int]:
    """Return for each fused kernel how many bytes it reads and writes."""
    barriers = {node: _is_barrier(node) for node in graph.nodes}
    levels: dict[fx.Node, int] = {}
    kernel: dict[fx.Node, fx.Node] = {}  # of a fused node, or a view of one: the root of the tree that it is in
    tree: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while tree[node] is not node:
            tree[node] = tree[tree[node]]
            node = tree[node]
        return node

    for node in graph.nodes:
        before = node.all_input_nodes
        levels[node] = max((levels[i] + barriers[i] for i in before), default=0)
        if node.target in VIEWS or Getitem.of(node) is not None:
            if before and before[0] in kernel:
                kernel[node] = kernel[before[0]]
        elif _kind(node) == "fused" and is_tensor(node):
            tree[node] = kernel[node] = node
            for i in before if not barriers[node] else ():
                if i in kernel and levels[i] == levels[node] and not barriers[i]:
                    tree[root(kernel[i])] = root(node)
    moved: dict[fx.Node, set[fx.Node]] = {}  # what each kernel reads or writes

    def is_elsewhere(node: fx.Node, mine: fx.Node) -> bool:
        return node not in kernel or root(kernel[node]) is not mine

    for node in tree:
        mine = root(node)
        found = moved.setdefault(mine, set())
        found.update(base(i) for i in node.all_input_nodes if is_elsewhere(i, mine))
        if any(is_elsewhere(u, mine) for u in node.users):
            found.add(node)
    return [sum(map(_bytes, found)) for found in moved.values()]


def _is_barrier(node: fx.Node) -> bool:
    """Return True if what reads `node` is in another kernel than what `node` reads."""
    kind = _kind(node)
    if kind == "fused":
        reduces = node.target in fusible.REDUCTIONS or node.target in fusible.MOMENTS
        return reduces and not fusible.is_row_reduction(node)
    return kind != ""


def _bytes(node: fx.Node) -> int:
    return prod(_sizes(node)) * value(node).element_size() if is_tensor(node) else 0


def _gradients(graph: fx.Graph) -> int:
    """Return how many gradients a joint graph returns, roughly: its outputs but one."""
    outputs = pytree.tree_leaves(graph.output_node().args)
    return max(0, sum(isinstance(x, fx.Node) for x in outputs) - 1)
