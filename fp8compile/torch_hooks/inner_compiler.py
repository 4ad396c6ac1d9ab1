"""What makes callables of forward, backward and inference graphs: Inductor, or an executor that runs node by node.

compile_fx calls it with each half; the hook for halves (`half_passes.py`) has then been called, or a cache was hit.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch._guards import TracingContext  # where Inductor says how the results of a half lie
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table  # compile_fx takes another instead
from torch._inductor.utils import BoxedBool  # the form of its setting for CUDA graphs

from fp8compile.errors import FreedWeightError
from fp8compile.passes.core.compilation import CASTS_ARE_KEPT, FREED, KEPT, aten, has_markers
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.lower.split_weight_casts import split_weight_casts
from fp8compile.passes.save.saved_forms import bytes_of
from fp8compile.plan.record import Record, recall_half, remember_half
from fp8compile.plan.rows import Lowered
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.half_passes import LoweringPass, has_states, lower_half, lower_optimizer
from fp8compile.torch_hooks.inductor.our_graph import compiling_ours
from fp8compile.torch_hooks.inductor.output_strides import keep_strides_of_bases
from fp8compile.torch_hooks.kept_casts import KeptCasts
from fp8compile.torch_hooks.modules import nested_regions
from fp8compile.weight_uses import is_read, note_reads

Compiled = Callable[..., Any]
WEIGHTS = "weights"  # the graph of casts of weights, beside the halves


def compile_half(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    lowering: LoweringPass,
    record: Record,
    half: str = "",
    **settings: Any,
) -> Compiled:
    """Compile a half with Inductor, and record what became of it: the hook says so, or what was kept when that ran."""
    lowering.half, lowering.lowered = half or _half(settings), None
    keep_strides_of_bases(gm)
    bodies = [body.graph for body in nested_regions.bodies(gm)]
    text = "".join(map(graph_text, bodies))
    key = hashlib.sha256(f"{text}{lowering.uuid()}".encode()).hexdigest()
    try:
        has_fp8 = any(map(has_markers, bodies)) or any(map(has_states, bodies))
        with compiling_ours(has_fp8):
            compiled: Any = compile_fx_inner(gm, example_inputs, **settings)
    except Exception as error:
        if lowering.dump:
            lowering.dump.failed(lowering.half, error, gm.graph, "inductor")
        record.add_half(lowering.half, Lowered(failure=f"Inductor did not compile it: {failures.first_line(error)}"))
        raise
    if lowering.dump:
        lowering.dump.code(lowering.half, getattr(compiled, "source_code", ""))
    if lowering.lowered is not None:
        remember_half(key, lowering.lowered)
    lowered = lowering.lowered or recall_half(key)
    if lowered is not None:
        record.add_half(lowering.half, lowered)
    return compiled


def _half(settings: Mapping[str, Any]) -> str:
    """Return which graph compile_fx hands to its inner compiler."""
    if settings.get("is_backward"):
        return "backward"
    return "inference" if settings.get("is_inference") else "forward"


def compile_without_casts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compile_it: Compiled,
    lowering: LoweringPass,
    record: Record,
    **settings: Any,
) -> Compiled:
    """Compile a half by `compile_it` in two graphs: the casts of weights, which run when one was written, and the rest.

    Backward is given its casts by forward.
    """
    compile_it = functools.partial(compile_it, lowering=lowering, record=record)
    split = None if settings.get("is_backward") else split_weight_casts(gm)
    if settings.get("is_backward"):
        _donate_no_casts(gm)
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    inputs = placeholders[: len(example_inputs)]
    read = [i for i, node in enumerate(inputs) if node.meta.get(CASTS_ARE_KEPT) and node.users]
    _refuse_freed([inputs[i] for i in read])
    if split is None:
        compiled = compile_it(gm, example_inputs, **settings)
        return _noting(compiled, read) if read else compiled
    alone = {**settings, "cudagraphs": BoxedBool(False), "is_inference": True}
    alone["static_input_idxs"] = range(len(split.inputs))
    weights = [example_inputs[i] for i in split.inputs]
    with TracingContext.report_output_strides():  # those of the half are asked for, and not these
        casts = compile_it(split.module, weights, half=WEIGHTS, **alone)
    values = [node.meta["val"] for node in placeholders[len(inputs) :]]
    record.add_kept(WEIGHTS, sum(map(bytes_of, values)))
    staying = _without_unread(gm, inputs)
    static = set(settings.get("static_input_idxs", ()))
    still = [n for n, i in enumerate(staying) if i in static]
    settings["static_input_idxs"] = [*still, *range(len(staying), len(staying) + len(values))]
    rest = compile_it(gm, [*(example_inputs[i] for i in staying), *values], **settings)
    by = lowering.uuid()  # other options may round what lies before a cast otherwise
    kept = KeptCasts(
        casts,
        [replace(value, key=f"{by}{value.key}") for value in split.values],
        in_place=lowering.options.replays or not lowering.options.keep_casts,
    )

    def run(args: list[Any]) -> Any:
        _note(args, read)
        given = [args[i] for i in staying] + kept([args[i] for i in split.inputs])
        args.clear()
        return rest(given)

    vars(run)["_boxed_call"] = True
    return run


def _donate_no_casts(backward: fx.GraphModule) -> None:
    """Let backward not write into the memory of casts that are kept, which torch takes for activations."""
    context = TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    if meta is not None and meta.bw_donated_idxs:
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        meta.bw_donated_idxs = [i for i in meta.bw_donated_idxs if not inputs[i].meta.get(KEPT)]


def _refuse_freed(read: Sequence[fx.Node]) -> None:
    """Raise if a graph reads a weight as it is whose memory was freed."""
    names = [node.meta[FREED] for node in read if FREED in node.meta]
    if names:
        raise FreedWeightError(
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: this call reads in BF16 what was freed. Run "
            "every kind of call (prompt, token, batch size) once before fp8compile.free_weights"
        )


def _without_unread(gm: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[int]:
    """Remove the weights that a graph does not read any more, as they are cast elsewhere; return which inputs stay."""
    staying = [i for i, node in enumerate(inputs) if node.users or not node.meta.get(CASTS_ARE_KEPT)]
    for i in set(range(len(inputs))) - set(staying):
        gm.graph.erase_node(inputs[i])
    gm.recompile()
    return staying


def _noting(compiled: Compiled, read: Sequence[int]) -> Compiled:
    """Return `compiled`, which notes which weights it reads as they are."""

    def run(args: list[Any]) -> Any:
        _note(args, read)
        return compiled(args)

    vars(run)["_boxed_call"] = True
    return run


def _note(args: Sequence[Any], read: Sequence[int]) -> None:
    """Note what of `args` is read as it is: which weights a graph is called with may change."""
    new = [args[i] for i in read if not is_read(args[i])]
    if new:
        note_reads(new)


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions but that of eye, which counts in UInt16: eager CPUs have no kernel for that."""
    with config.patch(fallback_random=True):  # as a graph is compiled that runs node by node
        return {op: f for op, f in select_decomp_table().items() if op not in (aten.eye.default, aten.eye.m)}


def run_eagerly(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    lowering: LoweringPass,
    record: Record,
    half: str = "",
    **settings: Any,
) -> Compiled:
    """Return what runs the graph node by node. It takes its arguments as one list, and empties it."""
    half = half or _half(settings)
    lowered = Lowered()
    for body in nested_regions.bodies(gm):
        lowered += _lower(body.graph, half, lowering)
        for view in body.graph.find_nodes(op="call_function", target=aten.view.default):
            view.target = aten.reshape.default  # an attention's result may not lie in memory as its fake does
        body.recompile()
    record.add_half(half, lowered)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return gm.forward(*given)

    vars(run)["_boxed_call"] = True  # AOTAutograd's protocol for callables that free their inputs
    return run


def _lower(graph: fx.Graph, half: str, lowering: LoweringPass) -> Lowered:
    """Run the passes that a graph needs which is run node by node."""
    if has_states(graph):
        return lower_optimizer(graph, lowering.options, lowering.dump)
    if lowering.options.kernels == "generated":
        return lower_half(HalfGraph(graph, lowering.options, half, "operators"), lowering.dump)
    if lowering.dump:
        lowering.dump.stage(half, "cut", graph)
    return Lowered()
