"""The graph under work: what passes know about it, and the few ways in which they edit it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether unused random numbers must be drawn all the same
from torch._subclasses.fake_tensor import FakeTensor  # no public name; nodes carry these as their value metadata
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.devices import Device
from fp8compile.passes.core.aten_views import Permutation
from fp8compile.passes.core.matmul_node import Matmuls
from fp8compile.passes.core.node_views import Getitem, first_input
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.stages import Stage, StageGraph
from fp8compile.passes.core.walk import walk
from fp8compile.plan.plan import Plan

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.t.default,
    aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default,
    aten.expand.default, aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
}  # fmt: skip
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)  # tags of a checkpointed region
# What a node inherits from the one it is made for: where it comes from, and to which checkpointed region and which
# half of training it belongs. Without the region's tags a partitioner would save what it should recompute.
INHERITED = (
    "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "recompute", "ac_graph_id", "partitioner_tag",
    "custom",
)  # fmt: skip

CASTS_ARE_KEPT = "fp8_casts_are_kept"  # of an input whose casts are kept from one run to the next: FROZEN or TRAINED
FROZEN, TRAINED = "a weight that nobody is said to write", "a weight that optimizers write"
KEPT = "fp8_kept"  # of a node: such a cast, or what is computed of such casts alone
FREED = "fp8_freed"  # of such an input: the user's name of a weight whose memory was freed
STANDS_ALONE = "fp8_stands_alone"  # of a copy: no region computes it
AS_STORED = "fp8_as_stored"  # of a cast: it reads its tensor as rounded to the tensor's dtype, wherever it is computed


@dataclass(frozen=True)
class Input:
    """A graph input in the user's terms: a parameter, a buffer, or neither (it comes with the batch).

    is_kept: its casts are kept from one run to the next, until it is written. is_trained: it is, and gets gradients.
    freed: its name in its model if they have to be, as its memory was freed; passes do the same as before. is_table: a
    graph looks up rows in it, as in an embedding.
    """

    is_parameter: bool
    is_buffer: bool = False
    name: str = ""
    is_kept: bool = False
    is_trained: bool = False
    freed: str = field(default="", repr=False)
    is_table: bool = False


@dataclass
class Compilation(StageGraph):
    """One joint or inference graph on its way through the passes."""

    device: Device
    plan: Plan
    inputs: dict[str, Input] = field(default_factory=dict)
    namespace: str = "model0"
    matmuls: Matmuls = field(default_factory=Matmuls)  # from select_matmuls on
    stage: Stage = field(default=Stage.JOINT, kw_only=True)

    @cached_property
    def is_training(self) -> bool:
        """True if the graph holds a backward half."""
        return any(is_tangent(n) for n in self.graph.find_nodes(op="placeholder"))

    def emit(
        self,
        target: Callable[..., Any],
        *args: Any,
        like: fx.Node,
        before: fx.Node | None = None,
        contiguous: bool = False,
        **kwargs: Any,
    ) -> fx.Node:
        """Return a new call of `target` before `before` (default: `like`), with the origin of `like` and its own value.

        `contiguous` passes memory_format=torch.contiguous_format, as a clone needs to be one; `kwargs` are the call's.
        """
        if contiguous:
            kwargs["memory_format"] = torch.contiguous_format
        place = before or like
        assert not place._erased, f"cannot place a node before {place}, which is no longer in the graph"
        with self.graph.inserting_before(place):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
        try:
            update_value(node)
        except Exception:
            self.graph.erase_node(node)
            raise
        return node

    def transposed(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Return a node with the transpose (last two dimensions) of `node`'s value: one that there is, or a new one."""
        for user in node.users:
            if is_transpose_of(user, node):
                return user
        source = node.all_input_nodes[0] if node.target in VIEWS else None
        if source is not None and is_transpose_of(node, source):
            return source
        dims = list(range(value(node).dim()))
        dims[-2:] = dims[-1], dims[-2]
        return self.emit(aten.permute.default, node, dims, like=like)


def is_transpose_of(view: fx.Node, source: fx.Node) -> bool:
    """Return True if `view` is `source` with its last two dimensions swapped."""
    if view.target is not aten.permute.default or first_input(view) is not source:
        return False
    dims = Permutation(view).dims
    n = len(dims)
    return n >= 2 and dims == [*range(n - 2), n - 1, n - 2]


def value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that `node` computes."""
    return node.meta["val"]


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device that `graph` computes on: the first that is not the CPU."""
    tensors = [v for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def update_value(node: fx.Node) -> None:
    """Compute `node`'s fake value from those of its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[misc]
    nodes = node.all_input_nodes or node.graph.nodes  # what makes a tensor out of nothing makes a fake one, too
    mode = next((a.fake_mode for n in nodes if isinstance(a := n.meta.get("val"), FakeTensor)), None)
    if mode is None:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    elif node.target in ops.FAKES:  # what torch would call, by a long way
        node.meta["val"] = ops.FAKES[node.target](*args, **kwargs)  # type: ignore[index]
    else:
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def shows_memory(node: fx.Node) -> bool:
    """Return True if the result of `node` may lie in the memory of its first input."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return shows_memory(first_input(node))
    return node.target in VIEWS or node.target is aten.reshape.default or bool(getattr(node.target, "is_view", False))


def is_detached(node: fx.Node) -> bool:
    """Return True if the value of a view has other memory than that of what it is a view of.

    torch goes by it: what is saved for backward and shares no memory with an output may be overwritten in backward.
    """
    source = node.all_input_nodes[0]
    if not (shows_memory(node) and is_tensor(node) and is_tensor(source)) or value(node).is_sparse:
        return False
    if value(node).untyped_storage()._cdata == value(source).untyped_storage()._cdata:
        return False
    if node.target is not aten.reshape.default:
        return True
    with value(source).fake_mode:  # type: ignore[attr-defined]  # some are views, and some copies
        shown = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))  # type: ignore[operator]
    return shown.untyped_storage()._cdata == value(source).untyped_storage()._cdata


def attach_views(graph: fx.Graph) -> None:
    """Give views values that lie in the memory of what they are views of, which passes may have replaced."""
    for node in graph.nodes:
        if shows_memory(node) and (node.target is operator.getitem or not is_tensor(node) or is_detached(node)):
            _attach(node)


def _attach(node: fx.Node) -> None:
    """Compute the value of a view anew; parts of what is split are taken from it."""
    if (part := Getitem.of(node)) is not None:
        node.meta["val"] = part.source.meta["val"][part.index]
        return
    try:
        update_value(node)
    except (RuntimeError, ValueError):  # these strides allow no view: Inductor's pad_mm slices what a view reads
        if node.target is aten.view.default:
            _copy_in_place_of_view(node)


def _copy_in_place_of_view(node: fx.Node) -> None:
    """Turn a view into a reshape; leave one alone that has another number of elements, which the verifier finds."""
    node.target = aten.reshape.default
    try:
        update_value(node)
    except (RuntimeError, ValueError):
        node.target = aten.view.default


def complete_values(graph: fx.Graph) -> None:
    """Compute the fake values that are missing: Inductor's micro_pipeline_tp leaves none, and no sorted graph."""

    def complete(node: fx.Node) -> None:
        if node.op == "call_function" and "val" not in node.meta:
            for read in node.all_input_nodes:
                complete(read)
            update_value(node)

    for node in graph.nodes:
        complete(node)


def is_tangent(node: fx.Node) -> bool:
    """Return True if a node is an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def in_recomputed_region(node: fx.Node) -> bool:
    """Return True for a node of a checkpointed region, which backward computes again; torch 2.15 tags inputs, too."""
    return node.op != "placeholder" and node.meta.get("recompute") in RECOMPUTED


def has_markers(graph: fx.Graph) -> bool:
    """Return True if a graph has FP8: casts, matmuls, or values that were saved as payload and scales."""
    return any(node.target in ops.MARKERS for node in graph.nodes)


def is_tensor(node: fx.Node) -> bool:
    """Return True if `node` computes one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory `node` is a view of."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def dependents(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `roots` and every node computed from one of them."""
    found = set(roots)
    for node in graph.nodes:
        if node not in found and any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def depends_on(inputs: Sequence[fx.Node], targets: set[fx.Node], order: Mapping[fx.Node, float]) -> bool:
    """Return True if one of `inputs` is computed from one of `targets`; `order` numbers the nodes of the graph."""
    earliest = min(order[t] for t in targets)
    reached = walk(inputs, lambda node: (i for i in node.all_input_nodes if order.get(i, -1) >= earliest))
    return any(node in targets for node in reached)


def sort_topologically(graph: fx.Graph) -> None:
    """Move every node behind its inputs, keeping the order otherwise."""
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    pending = list(reversed(list(graph.nodes)))
    cursor: fx.Node | None = None
    while pending:
        node = pending.pop()
        missing = next((i for i in node.all_input_nodes if i not in placed), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(node)
            continue
        placed.add(node)
        if cursor is not None and cursor.next is not node:
            cursor.append(node)
        cursor = node
        pending += reversed(waiting.pop(node, []))
    if waiting:
        raise RuntimeError("the graph has a cycle")


def remove_dead(graph: fx.Graph) -> None:
    """Erase what nothing uses, in this graph alone.

    Torch's `eliminate_dead_code` goes on into the graphs of regions and branches, and erases there what writes into its
    arguments and is used by nobody: the launches of kernels, once Inductor has been through those graphs.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and not node.is_impure(inductor_config.fallback_random):
            graph.erase_node(node)


def getitems(node: fx.Node) -> dict[int, fx.Node]:
    """Return the nodes that take single results out of a tuple `node`, by index."""
    return {part.index: part.node for user in node.users if (part := Getitem.of(user)) is not None}


def reshape(c: Compilation, node: fx.Node, shape: Sequence[Any], like: fx.Node) -> fx.Node:
    """Return `node` in another shape, of a contiguous copy where no view can do it."""
    if same_sizes(value(node).shape, shape):
        return node
    try:
        return c.emit(aten.view.default, node, list(shape), like=like)
    except (RuntimeError, ValueError):  # a view that cannot be: fake tensors raise either
        copy = c.emit(aten.clone.default, node, like=like, contiguous=True)
        return c.emit(aten.view.default, copy, list(shape), like=like)
