"""The partitioner: joint graph → forward and backward, by our own cut (`passes/save/min_cut.py`).

    forms      in which form each value would be kept           passes/save/saved_forms.py
    cut        which values are kept, within a budget            passes/save/min_cut.py, save_budget.py
    rewrite    what is kept as FP8 becomes payload and scales    passes/save/save_as_fp8.py
    move       what is beyond the budget waits on the host       passes/save/save_on_host.py

Everything else is torch's: which nodes each half needs, the two graphs, checkpointing with random numbers, the order of
backward. These functions have no public name; they are imported here and nowhere else. A graph without FP8 casts in
which nothing would be kept as FP8 is left to torch's own partitioner; so is, unless option `save` or a plan asks for
rounding, a graph without FP8 matmuls: its gradients are then those of BF16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config  # whether equal nodes are unified before the cut
from torch._functorch import partitioners as torch_partitioners  # the parts of torch's partitioner that we keep
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput  # what an output of a graph is
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # the hook's base: its uuid() keys the caches
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import devices, ops
from fp8compile.errors import OptionError
from fp8compile.options import KEEP_ALL, Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import aten, dependents, device_of, has_markers, remove_dead, value
from fp8compile.passes.core.node_views import Copy
from fp8compile.passes.core.snapshot import Snapshot
from fp8compile.passes.core.verify import signature
from fp8compile.passes.core.verify_halves import verify_halves
from fp8compile.passes.core.walk import walk
from fp8compile.passes.lower.split_weight_casts import mark_for_backward
from fp8compile.passes.save.min_cut import Halves, is_object, may_be_computed_again, run_again
from fp8compile.passes.save.rounding_hazards import find_hazards
from fp8compile.passes.save.save_as_fp8 import Cut
from fp8compile.passes.save.save_budget import plan_within
from fp8compile.passes.save.save_on_host import Host, move_to_host
from fp8compile.passes.save.saved_forms import Form, Graph, as_it_is, find_forms
from fp8compile.passes.save.saved_overrides import override_saved
from fp8compile.passes.save.saved_rows import count_recomputed, recomputed_rows, saved_rows
from fp8compile.passes.save.saved_value import saved_values
from fp8compile.plan import overrides
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason, Why
from fp8compile.plan.record import Record
from fp8compile.source_digest import source_digest
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.calls.user_frame import warn_user
from fp8compile.torch_hooks.modules import nested_regions

ADDING = {
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
    aten.scatter_add.default, aten.index_add.default, aten.embedding_dense_backward.default,
}  # fmt: skip


class Partitioner(CustomPartitionerFn):
    """torch's hook for a partitioner; `record` is told what is saved."""

    def __init__(self, options: Options, record: Record | None = None):
        self.options = options
        self.record = record

    def see_joint(self, graph: fx.Graph) -> None:
        """See the joint graph before any pass."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Return (forward, backward) of the joint graph `gm`."""
        kwargs = with_static_parts(gm, kwargs)
        ours = self.options.activation_budget is not None or has_markers(gm.graph)
        backup, forms = Snapshot(gm.graph), {}
        try:
            if not ours:
                forms = {node.name: form for node, form in _halves(gm, kwargs, self.options).forms.items()}
            if ours or any(form.granularity for form in forms.values()):
                return _partition(gm, joint_inputs, kwargs, self.options, self.record)
        except Exception as error:
            if self.options.strict or isinstance(error, OptionError):
                raise
            gm.graph = backup.graph()
            failures.warn(error, gm.graph, self.options, "What backward needs is chosen and kept as without FP8")
        return self._by_torch(gm, joint_inputs, kwargs, forms)

    def _by_torch(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any], known: dict[str, Form]
    ) -> Any:
        """Cut by torch's own partitioner, and record what it saves."""
        p = torch_partitioners
        _copy_what_is_written(gm.graph)
        forward, backward = p.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self.record is not None:
            primals = [n for n in forward.graph.find_nodes(op="placeholder") if p._is_primal(n)]
            static = {primals[i] for i in kwargs.get("static_lifetime_input_indices") or [] if i < len(primals)}
            outputs: Any = forward.graph.output_node().args[0]
            saved = [n for n in outputs[kwargs["num_fwd_outputs"] :] if isinstance(n, fx.Node)]
            tensors = [n for n in saved if isinstance(n.meta.get("val"), torch.Tensor)]
            by_torch = Why(Reason.TORCH, "saved by torch's own cut")
            forms = {n: as_it_is(value(n), known[n.name].why if n.name in known else by_torch) for n in tensors}
            self.record.add_saved(saved_rows(saved_values(saved, forms, static), static), {}, [])
        return forward, backward

    def uuid(self) -> str:
        """Return a key of the source and the options, which decide what it does."""
        return f"partitioner-{source_digest()}-{self.options!r}"


def with_static_parts(gm: fx.GraphModule, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with the inputs that stay where they are numbered as `gm` has them.

    Of a nested region torch names none. It numbers them as the user's function has them, where a tensor subclass is one
    input; in the graph it is several (the payload and the scale of a weight), and whatever follows would be taken for
    another input.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if held := [i for i, node in enumerate(inputs) if node.meta.get(nested_regions.HELD)]:
        return {**kwargs, "static_lifetime_input_indices": held}
    descs = [node.meta.get("desc") for node in inputs]
    if not any(hasattr(desc, "attr") for desc in descs):
        return kwargs
    given = set(kwargs.get("static_lifetime_input_indices") or [])
    static = [i for i, desc in enumerate(descs) if _outer_index(desc) in given]
    return {**kwargs, "static_lifetime_input_indices": static}


def _outer_index(desc: Any) -> int | None:
    """Return the number of the user's input that an input is (a part of); None for any other."""
    while not hasattr(desc, "idx") and hasattr(desc, "base"):
        desc = desc.base
    return getattr(desc, "idx", None)


def _partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    kwargs: dict[str, Any],
    options: Options,
    record: Record | None = None,
) -> Any:
    p = torch_partitioners
    gm, has_checkpointed_random = _made_ready(gm)
    _copy_what_is_written(gm.graph)
    halves = _halves(gm, kwargs, options)
    outputs, count = signature(gm.graph), kwargs["num_fwd_outputs"]
    if not halves.backward:
        return p.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    where = device_of(gm.graph)
    device = devices.describe(where)
    returned, *_ = p._extract_fwd_bwd_outputs(gm, num_fwd_outputs=count)
    host = Host.of(halves, [n for n in returned if isinstance(n, fx.Node)], device, where) if options.offload else None
    choice = plan_within(gm.graph, halves, options.activation_budget, device, host)
    if choice.missed:
        warn_user(f"fp8: {choice.missed}")
    sizes = [n for n in choice.saved if p.is_sym_node(n)]
    objects = [n for n in choice.saved if n not in sizes and is_object(n)]
    tensors = [n for n in choice.saved if n not in sizes and n not in objects]

    def to_move(kept: list[fx.Node]) -> list[fx.Node]:
        return host.choose(kept, choice.moved, halves) if host is not None else []

    saved, moved = _save(gm, tensors, sizes, halves, options, record, to_move)
    forward, backward = _extract(gm, saved, sizes, objects, halves, count)
    if has_checkpointed_random:
        forward, backward = p.functionalize_rng_ops(gm, forward, backward, len(sizes))
    forward, backward = _finish(forward, backward)
    if options.verify:
        verify_halves(forward.graph, backward.graph, outputs[:count])
    if moved:
        move_to_host(forward.graph, backward.graph, [n.name for n in moved])
    return forward, backward


def _made_ready(gm: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """Prepare `gm` for the cut as torch does; return it, and True if something random is checkpointed."""
    p = torch_partitioners
    remove_dead(gm.graph)
    if functorch_config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    checkpointed, random = p.has_recomputable_ops(gm), p.has_recomputable_rng_ops(gm)
    if checkpointed:
        gm = p.cleanup_recompute_tags(gm, is_default_partition=False)
    p.force_save_collectives(gm)
    p.force_save_effectful_ops(gm)
    p.force_save_bw_mutation_src(gm)
    return gm, checkpointed and random


def _extract(
    gm: fx.GraphModule, saved: list[fx.Node], sizes: list[fx.Node], objects: list[fx.Node], halves: Halves, count: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward, with what is saved between them. count: of the model's outputs."""
    extract: Any = torch_partitioners._extract_fwd_bwd_modules
    extra: dict[str, Any] = {}
    if _takes(extract, "saved_opaque_nodes"):
        extra = {"saved_opaque_nodes": objects}
    else:
        saved = [*saved, *objects]
    static = halves.static
    return extract(
        gm, saved, saved_sym_nodes=sizes, num_fwd_outputs=count, static_lifetime_input_nodes=static, **extra
    )  # fmt: skip


def _finish(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the halves in the order that torch gives them, with their random states."""
    p = torch_partitioners
    backward = p.reordering_to_mimic_autograd_engine(backward)
    forward, backward = p.raise_getitems(forward), p.raise_getitems(backward)
    forward = p.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = p.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def _halves(gm: fx.GraphModule, kwargs: dict[str, Any], options: Options) -> Halves:
    """Return what is known of the two halves, with the form of every value."""
    p = torch_partitioners
    outputs = kwargs["num_fwd_outputs"]
    info = p.classify_nodes(gm, kwargs.get("static_lifetime_input_indices") or [], outputs)
    recomputable = p.get_default_op_list().is_recomputable
    if device_of(gm.graph).type == "cpu":
        recomputable = _but_for_places(recomputable)
    written = set(_written_inputs(gm.graph))
    casts = mark_for_backward(gm.graph) if options.keep_casts else set[fx.Node]()
    halves = Halves(
        set(info.inputs),
        set(info.required_fw_nodes),
        {n for n in info.required_bw_nodes if n.op != "output"},
        (set(info.static_lifetime_input_nodes) - written) | casts,
        recomputable,
        written=written,
    )
    returned, gradients, *_ = p._extract_fwd_bwd_outputs(gm, num_fwd_outputs=outputs)
    primals = [n for n in gm.graph.find_nodes(op="placeholder") if p._is_primal(n)]
    differentiable = {n for n, gradient in zip(primals, gradients, strict=False) if gradient is not None}
    known = Graph(
        {n for n in returned if isinstance(n, fx.Node)},
        (halves.inputs - differentiable) | halves.static,
        halves.forward - halves.backward,
        _is_in_fp8(gm) or overrides.wants_fp8(options.plan),
    )
    device = devices.describe(device_of(gm.graph))
    if (device.has_fp8 or device.emulated) and options.save != KEEP_ALL:
        again = {n for n in gm.graph.nodes if n not in halves.backward and may_be_computed_again(n, recomputable)}
        hazards = find_hazards(gm.graph, again.__contains__, halves.backward.__contains__)
        halves.exact.update(hazards)
        halves.forms.update(find_forms(gm.graph, known, options, hazards))
    return halves


def _written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs that are overwritten: by the graph, or by torch when it has run, if gradients flow through."""
    inputs = graph.find_nodes(op="placeholder")
    copies = map(Copy, graph.find_nodes(op="call_function", target=aten.copy_.default))
    by_graph = [copy.written for copy in copies if copy.written.op == "placeholder"]
    returned = graph.output_node().meta.get("desc") or []
    mutated = {desc.mutated_input for desc in returned if isinstance(desc, InputMutationAOTOutput)}
    return list(dict.fromkeys([*by_graph, *(n for n in inputs if n.meta.get("desc") in mutated)]))


def _copy_what_is_written(graph: fx.Graph) -> None:
    """Let everything read a copy of an input that the graph overwrites, if backward may need what it was: of two forms
    of it only the copy can be kept. One that is not kept is made for what a fused kernel does not read.

    torch's partitioner would keep the input, which costs nothing, and compute from what is in it by then: in
    `torch.compile` such gradients are wrong without a word (torch 2.13, 2.14).
    """
    written = _written_inputs(graph)
    if not written:
        return
    gradients = [n for n in graph.find_nodes(op="placeholder") if torch_partitioners._is_tangent(n)]
    needed = set(walk(dependents(graph, gradients) - {graph.output_node()}))
    last_input = list(graph.find_nodes(op="placeholder"))[-1]
    for node in written:
        if node not in needed:
            continue
        with graph.inserting_after(last_input):
            copy = graph.call_function(aten.clone.default, (node,))
        copy.meta = {name: x for name, x in node.meta.items() if name in ("val", "tensor_meta")}
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # to torch's partitioner: never made again in backward
        for reader in list(node.users):
            is_written_to = reader.target is aten.copy_.default and Copy(reader).written is node
            if reader is not copy and not is_written_to:
                reader.replace_input_with(node, copy)


def _is_in_fp8(gm: fx.GraphModule) -> bool:
    """Return True if any matmul of a graph, or of the regions that it calls, is in FP8."""
    return any(n.target is ops.scaled_mm for body in nested_regions.bodies(gm) for n in body.graph.nodes)


def _but_for_places(is_recomputable: Callable[[fx.Node], bool]) -> Callable[[fx.Node], bool]:
    """Return `is_recomputable`, but for numbers of the places at which something is added up, of symbolic shapes.

    Where Inductor's C++ computes such a place in a tile that it transposes, it counts the tile's inner loop twice, and
    adds elsewhere (torch 2.11 and 2.13). What is loaded instead is right.
    """

    def is_place(node: fx.Node) -> bool:
        x = node.meta.get("val")
        return (
            isinstance(x, torch.Tensor)
            and x.dtype in (torch.int32, torch.int64)
            and not all(isinstance(n, int) for n in x.shape)
            and any(user.target in ADDING for user in node.users)
        )

    return lambda node: not is_place(node) and is_recomputable(node)


def _save(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    sizes: list[fx.Node],
    halves: Halves,
    options: Options,
    record: Record | None,
    to_move: Callable[[list[fx.Node]], list[fx.Node]],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes that are saved, payloads in place of values, and those of them that `to_move` moves to the host.

    The plan is told; `sizes` gets what they need.
    """
    again = run_again(gm.graph, [*nodes, *sizes], halves)
    restored = recomputed_rows(again, halves)  # before nodes are doubled
    saved = saved_values(nodes, halves.forms, halves.static)
    override_saved(saved, options.plan)
    device = devices.describe(device_of(gm.graph))
    pipeline.run_stage(c := Cut(gm.graph, options, device, Plan(), halves=halves, saved=saved, sizes=sizes))
    kept = c.kept
    moved = to_move(kept)
    if record is not None:
        record.add_saved(saved_rows(saved, halves.static, moved), count_recomputed(again, halves), restored)
    return kept, moved


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters
