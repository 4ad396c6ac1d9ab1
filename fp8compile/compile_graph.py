"""Compile one Dynamo graph: through AOTAutograd and Inductor, with the hooks in which passes run.

    Dynamo graph → AOTAutograd joint graph → passes/pipeline.py → forward, backward → Inductor (or the eager executor)

compile_fx and its pass hooks are the only way in between AOTAutograd and Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.compile_fx import compile_fx

from fp8compile.errors import OptionError
from fp8compile.insight.dump.baseline import DumpingPartitioner
from fp8compile.insight.dump.dumps import Dump
from fp8compile.options import Options
from fp8compile.passes.core.compilation import Input
from fp8compile.plan.plan import Plan
from fp8compile.plan.record import Record, key_of
from fp8compile.torch_hooks import graph_passes
from fp8compile.torch_hooks.calls.compilations import current_frame
from fp8compile.torch_hooks.half_passes import EarlyHalfPass, LoweringPass
from fp8compile.torch_hooks.inductor.inductor_settings import inductor_settings
from fp8compile.torch_hooks.inner_compiler import (
    compile_half,
    compile_without_casts,
    eager_decompositions,
    run_eagerly,
)
from fp8compile.torch_hooks.joint_pass import JointPass
from fp8compile.torch_hooks.modules import nested_regions
from fp8compile.torch_hooks.partitioner import Partitioner

Compiled = Callable[..., Any]


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    *,
    known: tuple[Input, ...],
    namespace: str,
    states: Plan | None = None,
) -> tuple[Compiled, list[Plan]]:
    """Return the compiled graph, and the list of its plans, which grows as halves are compiled.

    known: what the inputs are; states: the plan of an optimizer's graph.
    """
    dump = Dump(parsed.dump, parsed) if parsed.dump else None
    regions = nested_regions.inputs_of_regions(gm, known)
    if regions and parsed.recipe.is_delayed:
        raise OptionError(
            "delayed scaling keeps a history for each matmul, and the layers that share a nested_compile_region would "
            "share theirs: take a recipe without it, or leave torch.compiler.nested_compile_region away"
        )
    settings = inductor_settings(parsed, states is not None)
    joint = JointPass(parsed, known, namespace, dump, optimizer=states, regions=regions)
    key = key_of(gm, example_inputs, joint.uuid() + graph_passes.theirs_uuid(settings, "joint_custom_pre_pass"))
    record = joint.record = Record(key, parsed, dump.plans if dump else None, states)
    lowering = LoweringPass(parsed, dump)
    joint.partitioner = DumpingPartitioner(parsed, record, dump) if dump else Partitioner(parsed, record)
    graph_passes.warn_of_other_cut(settings)
    ours = {
        "joint_custom_pre_pass": joint,
        "post_grad_custom_pre_pass": EarlyHalfPass(parsed),
        "post_grad_custom_post_pass": lowering,
    }
    settings |= {**graph_passes.shared(settings, ours), "custom_partitioner_fn": joint.partitioner}
    inner: Any = compile_half if parsed.executor == "inductor" else run_eagerly
    decompositions = None if parsed.executor == "inductor" else eager_decompositions()
    if parsed.frozen or parsed.keep_casts:
        inner = functools.partial(compile_without_casts, compile_it=inner)
    inner = functools.partial(inner, lowering=lowering, record=record)
    compiled: Any = compile_fx(
        gm, example_inputs, inner_compile=inner, config_patches=settings, decompositions=decompositions
    )
    record.close(current_frame(example_inputs))
    return compiled, record.plans
