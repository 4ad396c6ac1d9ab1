"""The pipeline: every pass in order. Order is position; each has its reason here and its method in its file.

PIPELINE rewrites the joint graph, before the cut into forward and backward. AFTER_CUT makes kernels of each half, when
Inductor has run its own passes. (What those are to find is made ready before them: expose_matmuls.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fp8compile.passes.attention import attention_layout, attention_masks
from fp8compile.passes.collectives import exchange_as_fp8, gather_as_fp8
from fp8compile.passes.core.compilation import Compilation, attach_views, complete_values, remove_dead
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.stride_demands import broken_strides, record
from fp8compile.passes.core.verify import signature, verify
from fp8compile.passes.loss import chunk_loss
from fp8compile.passes.lower import call_matmuls, lower_markers, lower_regions
from fp8compile.passes.lower.kernel_rows import kernel_rows
from fp8compile.passes.lower.verify_kernels import outputs_of, verify_kernels
from fp8compile.passes.matmul import (
    assign_scales,
    canonicalize,
    convolutions,
    merge_matmuls,
    observe_casts,
    quantize_matmuls,
    row_major,
    select_matmuls,
    share_casts,
)
from fp8compile.passes.regions import combine_regions, form_regions
from fp8compile.plan.rows import Lowered


@dataclass(frozen=True)
class Pass:
    """A step of the pipeline: a name, what it does to a compilation, and why it stands where it stands.

    always: it has something to do where no matmul becomes FP8, too.
    """

    name: str
    run: Callable[[Compilation], None]
    why: str
    always: bool = False


PIPELINE = (
    Pass("canonicalize", canonicalize.run, "one form for matmuls and views, so that later passes see one pattern"),
    Pass("attention_masks", attention_masks.run, "masks that are constants go before anything is planned", always=True),
    Pass("select_matmuls", select_matmuls.run, "decides which matmuls become FP8, with a reason for each"),
    Pass("chunk_loss", chunk_loss.run, "a head that stays BF16 and its loss, in chunks; needs the roles", always=True),
    Pass("attention_layout", attention_layout.run, "attention writes what casts can read, where there are any"),
    Pass("assign_scales", assign_scales.run, "decides granularity and format of each operand, as the recipe says"),
    Pass("convolutions", convolutions.run, "chosen patch convolutions become plain matmuls, for the passes below"),
    Pass("row_major", row_major.run, "what rows are read of lies in rows; when convolutions are what they will be"),
    Pass("merge_matmuls", merge_matmuls.run, "fewer, larger matmuls and casts; needs equal casts, so after the scales"),
    Pass("quantize_matmuls", quantize_matmuls.run, "carries out the plan with markers"),
    Pass("share_casts", share_casts.run, "one cast a tensor, layout and granularity; when all casts stand"),
    Pass("gather_as_fp8", gather_as_fp8.run, "casts go in front of all-gathers: fewer bytes; all are known now"),
    Pass("exchange_as_fp8", exchange_as_fp8.run, "the same in front of all-to-alls, also by request", always=True),
)

OBSERVE = Pass("observe_casts", observe_casts.run, "measures each cast; with option `watch` alone", always=True)


def run_pipeline(c: Compilation, observe: Callable[[str, str], None] | None = None) -> None:
    """Run all passes on `c`, verifying after each; the plan has its rows afterwards, even if a pass raises.

    `observe(stage, text)` sees the graph first and after each.
    """
    try:
        _run_passes(c, observe)
    finally:
        c.plan.matmuls = c.matmuls.rows()


def _run_passes(c: Compilation, observe: Callable[[str, str], None] | None) -> None:
    outputs = signature(c.graph)
    record(c.graph)
    if observe:
        observe("input", graph_text(c.graph))
    decided = False
    for step in (*PIPELINE, OBSERVE) if c.options.watch else PIPELINE:
        if decided and not c.matmuls.converted and not step.always:
            continue  # nothing to carry out
        step.run(c)
        remove_dead(c.graph)
        attach_views(c.graph)
        if c.options.verify:
            verify(c.graph, step.name, outputs)
        if observe:
            observe(step.name, graph_text(c.graph))
        decided |= step.name == "select_matmuls"


@dataclass(frozen=True)
class Lowering:
    """A step after the cut: a name, what it does to a graph, why it stands there, and for which executors it is.

    It returns what it left undone, with reasons, or None.
    """

    name: str
    run: Callable[[fx.Graph], list[str] | None]
    why: str
    executors: tuple[str, ...]


# "operators": the graph is run node by node. "triton", "inductor": Inductor compiles it, with our kernels or without.
AFTER_CUT = (
    Lowering("form_regions", form_regions.form_regions, "casts and what is around them", ("operators", "triton")),
    Lowering("combine_regions", combine_regions.combine_regions, "fewer launches, no copies", ("operators", "triton")),
    Lowering("lower_regions", lower_regions.lower_regions, "kernels that Inductor launches", ("triton",)),
    Lowering("lower_markers", lower_markers.lower_markers, "casts that are left, as aten", ("triton", "inductor")),
    Lowering(
        "call_matmuls", call_matmuls.call_matmuls, "calls that Inductor makes; when none is looked for", ("triton",)
    ),
)


def run_after_cut(
    graph: fx.Graph,
    executor: str,
    half: str = "forward",
    observe: Callable[[str, str], None] | None = None,
    check: bool = True,
) -> Lowered:
    """Run the steps for this executor on a forward, backward or inference graph (`half`), verifying after each if
    `check`; returns what came of it."""
    lowered = Lowered()
    complete_values(graph)
    attach_views(graph)
    outputs = outputs_of(graph)
    broken = broken_strides(graph)  # what a compiler has laid out otherwise it brings in order itself
    for step in AFTER_CUT:
        if executor in step.executors:
            if step.name == "lower_regions":
                lowered.kernels = kernel_rows(graph, half)
            lowered.left += step.run(graph) or []
            attach_views(graph)
            if check:
                verify_kernels(graph, step.name, outputs, broken)
            if observe:
                observe(step.name, graph_text(graph))
    lowered.kernels = lowered.kernels or kernel_rows(graph, half)
    return lowered
