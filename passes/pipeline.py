"""The pipeline: every pass of every stage, in order. Order is position; each pass has its reason here and its method in
its file. `passes/core/stages.py` says when each stage is, `RULES` what holds there after every pass.
"""

from __future__ import annotations

from fp8compile.passes.attention import attention_layout, attention_masks, attention_strides, grouped_heads
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.collectives import exchange_as_fp8, expose_matmuls, gather_as_fp8
from fp8compile.passes.core import derivatives
from fp8compile.passes.core.compilation import Compilation, attach_views, complete_values, has_markers, remove_dead
from fp8compile.passes.core.run_passes import Observer, Pass, Rules, run_passes
from fp8compile.passes.core.stages import DynamoGraph, HalfGraph, OptimizerGraph, Stage, StageGraph
from fp8compile.passes.core.stride_demands import record
from fp8compile.passes.core.verify import form_verifier, graph_verifier
from fp8compile.passes.core.verify_dynamo import dynamo_verifier
from fp8compile.passes.loss import chunk_loss
from fp8compile.passes.lower import (
    call_matmuls,
    few_row_matmuls,
    keep_strides,
    lower_markers,
    lower_regions,
    place_copies,
)
from fp8compile.passes.lower.verify_kernels import half_verifier
from fp8compile.passes.matmul import (
    assign_scales,
    cast_before_gather,
    convolutions,
    merge_matmuls,
    observe_casts,
    quantize_matmuls,
    row_major,
    select_matmuls,
    share_casts,
)
from fp8compile.passes.optimizer import (
    batch_scalars,
    hoist_state_load_store,
    merge_updates,
    open_states,
    refuse_view_writes,
    skip_overflow,
    spread_scalars,
    store_load_forwarding,
    unscale_gradients,
)
from fp8compile.passes.optimizer.verify_optimizer import optimizer_verifier
from fp8compile.passes.regions import combine_regions, form_regions
from fp8compile.passes.save import save_as_fp8

DYNAMO, JOINT, CUT, OPTIMIZER = Stage.DYNAMO, Stage.JOINT, Stage.CUT, Stage.OPTIMIZER
EARLY_HALF, HALF, LATE_HALF = Stage.EARLY_HALF, Stage.HALF, Stage.LATE_HALF


def converts(c: Compilation) -> bool:
    """Return True if a matmul becomes FP8, as select_matmuls has decided."""
    return bool(c.matmuls.converted)


def watches(c: Compilation) -> bool:
    """Return True if casts are to be measured."""
    return bool(c.options.watch)


def is_step(c: DynamoGraph) -> bool:
    """Return True for the graph of an optimizer with 8-bit states."""
    return c.is_step


def is_scaled(c: DynamoGraph | OptimizerGraph) -> bool:
    """Return True for the step of an optimizer whose loss is scaled."""
    return c.unscaling is not None if isinstance(c, DynamoGraph) else c.overflow is not None


def has_kernels(c: HalfGraph) -> bool:
    """Return True if a graph has FP8 and is run with generated kernels, by Inductor or node by node."""
    return c.executor in ("operators", "triton") and has_markers(c.graph)


def on_triton(c: HalfGraph) -> bool:
    """Return True if Inductor compiles a graph, and launches generated kernels."""
    return c.executor == "triton"


def by_inductor(c: HalfGraph) -> bool:
    """Return True if Inductor compiles a graph."""
    return c.executor in ("triton", "inductor")


PIPELINE = (
    Pass("attention_strides", DYNAMO, attention_strides.run, "before AOTAutograd picks attention's kernel"),
    Pass("derivatives", DYNAMO, derivatives.run, "marks what the model differentiates, while that is to be seen"),
    Pass("refuse_view_writes", DYNAMO, refuse_view_writes.run, "while states are whole", is_step),
    Pass("spread_scalars", DYNAMO, spread_scalars.run, "rates become tensors before they are constants", is_step),
    Pass("hoist_state_load_store", DYNAMO, hoist_state_load_store.run, "one load and one store, to be opened", is_step),
    Pass("open_states", DYNAMO, open_states.run, "parts in place of states, when all loads stand", is_step),
    Pass("unscale_gradients", DYNAMO, unscale_gradients.run, "last: it adds buffers in front of all inputs", is_scaled),
    Pass("canonicalize", JOINT, canonicalize.run, "one form for matmuls and views: later passes see one pattern"),
    Pass("attention_masks", JOINT, attention_masks.run, "masks that are constants go before anything is planned"),
    Pass("grouped_heads", JOINT, grouped_heads.run, "repeated keys go, before what they cost is planned"),
    Pass("select_matmuls", JOINT, select_matmuls.run, "decides which matmuls become FP8, with a reason for each"),
    Pass("chunk_loss", JOINT, chunk_loss.run, "a head and its loss, in chunks; needs the roles and decisions"),
    Pass("attention_layout", JOINT, attention_layout.run, "attention writes what casts can read", converts),
    Pass("assign_scales", JOINT, assign_scales.run, "granularity and format of each operand, by the recipe", converts),
    Pass("convolutions", JOINT, convolutions.run, "chosen ones become matmuls, for those below", converts),
    Pass("row_major", JOINT, row_major.run, "inputs of row-wise casts, contiguous; after convolutions", converts),
    Pass("merge_matmuls", JOINT, merge_matmuls.run, "fewer, larger matmuls of equal casts; after the scales", converts),
    Pass("quantize_matmuls", JOINT, quantize_matmuls.run, "carries out the plan with markers", converts),
    Pass("share_casts", JOINT, share_casts.run, "one cast a tensor, layout and granularity; all casts stand", converts),
    Pass("gather_as_fp8", JOINT, gather_as_fp8.run, "casts go in front of all-gathers: all are known now", converts),
    Pass("exchange_as_fp8", JOINT, exchange_as_fp8.run, "the same in front of all-to-alls, also by request"),
    Pass("cast_before_gather", JOINT, cast_before_gather.run, "each row once; collectives have theirs", converts),
    Pass("observe_casts", JOINT, observe_casts.run, "measures each cast, when all stand where they stay", watches),
    Pass("save_as_fp8", CUT, save_as_fp8.run, "what is kept in FP8 becomes payload and scales, before graphs are two"),
    Pass("expose_matmuls", EARLY_HALF, expose_matmuls.run, "for a pass of Inductor's", expose_matmuls.is_wanted),
    Pass("form_regions", HALF, form_regions.run, "casts and what is around them", has_kernels),
    Pass("combine_regions", HALF, combine_regions.run, "fewer launches, no copies", has_kernels),
    Pass("lower_regions", HALF, lower_regions.run, "kernels that Inductor launches", on_triton),
    Pass("lower_markers", HALF, lower_markers.run, "casts that are left, as aten", by_inductor),
    Pass("few_row_matmuls", HALF, few_row_matmuls.run, "launches for those that call_matmuls would call", on_triton),
    Pass("call_matmuls", HALF, call_matmuls.run, "calls that Inductor makes; none is looked for then", on_triton),
    Pass("place_copies", LATE_HALF, place_copies.run, "kernels stand in their order", place_copies.has_copies),
    Pass("keep_strides", LATE_HALF, keep_strides.run, "last: of what is there when Inductor makes code"),
    Pass("store_load_forwarding", OPTIMIZER, store_load_forwarding.run, "then an update is one expression"),
    Pass("merge_updates", OPTIMIZER, merge_updates.run, "finds the expressions; one operator of equal ones"),
    Pass("batch_scalars", OPTIMIZER, batch_scalars.run, "now it is known which numbers belong together"),
    Pass("skip_overflow", OPTIMIZER, skip_overflow.run, "last: what is merged skips by itself", is_scaled),
)  # fmt: skip


def _tidy(c: StageGraph) -> None:
    remove_dead(c.graph)
    attach_views(c.graph)


def _make_rows(c: Compilation) -> None:
    c.plan.matmuls = c.matmuls.rows()


def _complete(c: StageGraph) -> None:
    complete_values(c.graph)
    attach_views(c.graph)


RULES = {
    DYNAMO: Rules(dynamo_verifier),
    JOINT: Rules(graph_verifier, prepare=lambda c: record(c.graph), tidy=_tidy, finish=_make_rows, shows_input=True),
    CUT: Rules(graph_verifier, tidy=lambda c: attach_views(c.graph)),
    EARLY_HALF: Rules(form_verifier),
    HALF: Rules(half_verifier, prepare=_complete, tidy=lambda c: attach_views(c.graph)),
    LATE_HALF: Rules(form_verifier),
    OPTIMIZER: Rules(optimizer_verifier, tidy=lambda c: attach_views(c.graph), shows_input=True),
}


def passes_for(c: StageGraph) -> list[Pass]:
    """Return the passes of the stage of `c`, in order."""
    return [step for step in PIPELINE if step.stage is c.stage]


def run_stage(c: StageGraph, observe: Observer | None = None) -> None:
    """Run the passes of the stage of `c` on it; `observe(name, text)` sees the graph after each."""
    run_passes(passes_for(c), c, RULES[c.stage], observe)
