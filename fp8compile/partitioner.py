"""The partitioner: joint graph → forward and backward, by our own cut (`passes/plan_saved.py`).

Everything but the choice of what is saved is torch's: which nodes each half needs, the two graphs, checkpointing with
random numbers, the order of backward. These functions have no public name; they are imported here and nowhere else.
A graph without FP8 casts is left to torch's own partitioner.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config  # whether equal nodes are unified before the cut
from torch._functorch import partitioners as torch_partitioners  # the parts of torch's partitioner that we keep
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # the hook's base: its uuid() keys the caches

from fp8compile import ops
from fp8compile.options import Options
from fp8compile.passes.plan_saved import Halves, plan_saved
from fp8compile.sources import source_digest


class Partitioner(CustomPartitionerFn):
    """torch's hook for a partitioner."""

    def __init__(self, options: Options):
        self.options = options

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """(forward, backward) of the joint graph `gm`."""
        if not any(n.target in ops.MARKERS for n in gm.graph.nodes):
            return torch_partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return _partition(gm, joint_inputs, kwargs)

    def uuid(self) -> str:
        """The source and the options decide what it does."""
        return f"partitioner-{source_digest()}-{self.options!r}"


def _partition(gm: fx.GraphModule, joint_inputs: Sequence[object], kwargs: dict[str, Any]) -> Any:
    p = torch_partitioners
    gm.graph.eliminate_dead_code()
    gm.recompile()
    if functorch_config.cse:
        gm.graph = fx_graph_cse(gm.graph)
    checkpointed, random = p.has_recomputable_ops(gm), p.has_recomputable_rng_ops(gm)
    if checkpointed:
        gm = p.cleanup_recompute_tags(gm, is_default_partition=False)
    p.force_save_collectives(gm)
    p.force_save_effectful_ops(gm)
    p.force_save_bw_mutation_src(gm)
    outputs, static = kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices") or []
    info = p.classify_nodes(gm, static, outputs)
    if not info.required_bw_nodes:
        return p.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    recomputable = p.get_default_op_list().is_recomputable
    halves = Halves(
        set(info.inputs),
        set(info.required_fw_nodes),
        set(info.required_bw_nodes),
        set(info.static_lifetime_input_nodes),
        recomputable,
    )
    saved = plan_saved(gm.graph, halves)
    sizes = [n for n in saved if p.is_sym_node(n)]
    saved = [n for n in saved if n not in sizes]
    extra: dict[str, Any] = (
        {"saved_opaque_nodes": []} if _takes(p._extract_fwd_bwd_modules, "saved_opaque_nodes") else {}
    )
    forward, backward = p._extract_fwd_bwd_modules(
        gm,
        saved,
        saved_sym_nodes=sizes,
        num_fwd_outputs=outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
        **extra,
    )
    if checkpointed and random:
        forward, backward = p.functionalize_rng_ops(gm, forward, backward, len(sizes))
    backward = p.reordering_to_mimic_autograd_engine(backward)
    forward, backward = p.raise_getitems(forward), p.raise_getitems(backward)
    forward = p.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, p.thread_graphsafe_rng_from_hops(backward, is_backward=True)


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters
