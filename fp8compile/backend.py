"""The backend: `torch.compile(model, backend="fp8", options={…})`.

    Dynamo graph → AOTAutograd joint graph → passes/pipeline.py → forward, backward → Inductor (or the eager executor)

The driver only: it parses options, hands torch its hooks, and keeps the plan. All private API of torch that the driver
needs is imported here: compile_fx and its pass hooks (the only way in between AOTAutograd and Inductor).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder, install_guard  # a delayed scale's history belongs to one model
from torch._inductor import config as inductor_config  # whether a user has chosen the width of a CPU's vectors
from torch._inductor import list_mode_options  # `mode` reaches a backend untranslated
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass  # the hooks' base: its uuid() keys the compile caches
from torch.utils._pytree import tree_leaves  # under compiled autograd an input is a list

from fp8compile import delayed, devices
from fp8compile.adaptive.adaptive_graph import AdaptiveGraph
from fp8compile.errors import OptionError
from fp8compile.insight.dump.baseline import DumpingPartitioner
from fp8compile.insight.dump.dumps import Dump
from fp8compile.optimizer import trace
from fp8compile.options import Options
from fp8compile.passes.attention import attention_strides
from fp8compile.passes.collectives import expose_matmuls
from fp8compile.passes.core.compilation import Compilation, Input, aten, device_of
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.snapshot import Snapshot, copy_graph, restore_graph
from fp8compile.passes.lower import call_matmuls
from fp8compile.passes.optimizer import skip_overflow
from fp8compile.passes.optimizer.optimizer_pipeline import OPTIMIZER, has_states, run_optimizer
from fp8compile.passes.pipeline import AFTER_CUT, PIPELINE, run_after_cut, run_pipeline
from fp8compile.plan.plan import Plan
from fp8compile.plan.record import Record, key_of, recall_half, remember_half
from fp8compile.plan.rows import Lowered
from fp8compile.source_digest import source_digest
from fp8compile.torch_hooks import (
    backward_hooks,
    compiled_calls,
    failures,
    graph_passes,
    nested_regions,
    recurrent_modules,
    trainers,
)
from fp8compile.torch_hooks.compilations import current_frame
from fp8compile.torch_hooks.output_strides import keep_strides_of_bases
from fp8compile.torch_hooks.partitioner import Partitioner
from fp8compile.torch_hooks.unwrapped_errors import unwrapped

Compiled = Callable[..., Any]


@unwrapped
def fp8(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one Dynamo graph with FP8 matmuls; what torch.compile calls. `options`: see `fp8compile.Options`.

    Raises `OptionError` for bad options. A graph that a pass cannot handle is compiled in its own precision with an
    `Fp8Warning`, unless `strict`.
    """
    compiled_calls.asked(fp8)
    parsed = Options.parse(options, mode)
    example_inputs, with_hooks = backward_hooks.insert(gm, example_inputs)
    attention_strides.run(gm)
    namespace = ""
    opt = trace.traced_optimizer(gm, example_inputs)
    if opt is None:
        trainers.warn_of_fused_optimizer()
    if parsed.recipe.is_delayed or (parsed.adaptive is not None and opt is None):
        _guard_identity(gm, example_inputs)
    if parsed.recipe.is_delayed:
        namespace = delayed.namespace([x for x in example_inputs if isinstance(x, torch.nn.Parameter)])
    known = tuple(_inputs(gm, example_inputs))
    if parsed.adaptive is not None and opt is None:
        compile_again = functools.partial(_compile, known=known, namespace=namespace)
        adaptive = AdaptiveGraph(gm, example_inputs, parsed, compile_again)
        return compiled_calls.counted(with_hooks(adaptive), [adaptive.plan])
    states = trace.plan_of(opt, gm, example_inputs, parsed) if opt is not None else None
    compiled, made = _compile(gm, example_inputs, parsed, known=known, namespace=namespace, states=states)
    return compiled_calls.counted(with_hooks(compiled), made)


def _is_fp8(backend: Any) -> bool:
    """Return whether a backend, as Dynamo holds it, is this one beneath torch's wrappers and options."""
    while backend is not None and backend is not fp8:
        beneath = (getattr(backend, name, None) for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"))
        backend = next((x for x in beneath if x is not None), None)
    return backend is fp8


compiled_calls.watch(fp8)
backward_hooks.trace_hooks(_is_fp8)
recurrent_modules.call_between_graphs(_is_fp8)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    *,
    known: tuple[Input, ...],
    namespace: str,
    states: Plan | None = None,
) -> tuple[Compiled, list[Plan]]:
    """Compile one graph, and say what was decided. known: of its inputs; states: the plan of an optimizer's graph."""
    dump = Dump(parsed.dump, parsed) if parsed.dump else None
    regions = nested_regions.inputs_of_regions(gm, known)
    if regions and parsed.recipe.is_delayed:
        raise OptionError(
            "delayed scaling keeps a history for each matmul, and the layers that share a nested_compile_region would "
            "share theirs: take a recipe without it, or leave torch.compiler.nested_compile_region away"
        )
    settings = _inductor_settings(parsed, states is not None) | dict(parsed.inductor)
    joint = JointPass(parsed, known, namespace, dump, optimizer=states, regions=regions)
    key = key_of(gm, example_inputs, joint.uuid() + graph_passes.theirs_uuid(settings, "joint_custom_pre_pass"))
    record = joint.record = Record(key, parsed, dump.plans if dump else None, states)
    lowering = LoweringPass(parsed, dump)
    joint.partitioner = DumpingPartitioner(parsed, record, dump) if dump else Partitioner(parsed, record)
    graph_passes.warn_of_other_cut(settings)
    ours = {
        "joint_custom_pre_pass": joint,
        "post_grad_custom_pre_pass": ExposingPass(parsed),
        "post_grad_custom_post_pass": lowering,
    }
    settings |= {**graph_passes.shared(settings, ours), "custom_partitioner_fn": joint.partitioner}
    compile_half = _run_eagerly if parsed.executor == "eager" else _compile_half
    inner: Any = functools.partial(compile_half, lowering=lowering, record=record)
    compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=settings)
    record.close(current_frame(example_inputs))
    return compiled, record.plans


@dataclass
class JointPass(CustomGraphPass):
    """Runs the pipeline on a joint (or inference) graph, and keeps the plan."""

    options: Options
    inputs: tuple[Input, ...]
    namespace: str
    dump: Dump | None = None
    record: Record | None = field(default=None, repr=False)
    optimizer: Plan | None = None  # of an optimizer's graph, which is rewritten after Inductor's own passes
    partitioner: Partitioner | None = field(default=None, repr=False)
    regions: Mapping[nested_regions.Types, Sequence[Input]] = field(default_factory=dict)
    is_done: bool = field(default=False, repr=False)  # what comes after the graph itself are halves of its regions

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, or leave it as it was when a pass fails."""
        if self.optimizer is not None:
            if self.record is not None:
                self.record.add(self.optimizer)
            return
        if self.is_done:
            return
        c = self._compilation(graph)
        backup = Snapshot(graph)
        if isinstance(self.partitioner, DumpingPartitioner):
            self.partitioner.before = fx.GraphModule(graph.owning_module or {}, copy_graph(graph))
        run = functools.partial(run_pipeline, observe=self.dump.observer("joint", graph)) if self.dump else run_pipeline
        try:
            run(c)
        except Exception as error:
            c.plan = c.plan.undone(failures.first_line(error))
            if self.dump:
                self.dump.failed("joint", error, graph, [step.name for step in PIPELINE])
                self.dump.plans([c.plan])  # of a compilation that ends here nothing else will be written
            if self.options.strict or isinstance(error, OptionError):  # a plan that does not fit: the user's to mend
                raise
            module: Any = graph.owning_module
            module.graph = as_it_was = backup.graph()
            failures.warn(error, as_it_was, self.options)
        if self.record is not None:
            self.record.add(c.plan)

    def _compilation(self, graph: fx.Graph) -> Compilation:
        device = devices.describe(device_of(graph))
        c = Compilation(graph, self.options, device, Plan(), self._inputs_of(graph), self.namespace)
        c.plan = Plan("training" if c.is_training else "inference", self.options.recipe.name, device.name)
        return c

    def _inputs_of(self, graph: fx.Graph) -> dict[str, Input]:
        """What is known of the placeholders of `graph`: AOTAutograd describes those of the graph itself alone."""
        placeholders = list(graph.find_nodes(op="placeholder"))
        self.is_done = any("desc" in n.meta for n in placeholders) or not placeholders
        if not self.is_done:
            return nested_regions.match_inputs(graph, self.regions)
        indices = {n.name: i for n in placeholders if (i := _input_index(n)) is not None}
        return {name: self.inputs[i] for name, i in indices.items() if i < len(self.inputs)}

    def uuid(self) -> str:
        """Everything that decides what this pass does, as a key for the compile caches."""
        text = repr((source_digest(), self.options, self.inputs, self.namespace, torch.__version__))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class ExposingPass(CustomGraphPass):
    """Before Inductor's own passes: matmuls as that for asynchronous tensor parallelism wants them, if it is to run
    (`passes/collectives/expose_matmuls.py`)."""

    options: Options

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, or leave it as it was."""
        if not expose_matmuls.is_wanted():
            return
        backup = Snapshot(graph)
        try:
            expose_matmuls.expose_matmuls(graph)
        except Exception as error:
            if self.options.strict:
                raise
            restore_graph(graph, backup.graph())
            failures.warn(error, graph, self.options, "Its matmuls are not pipelined with collectives")

    def uuid(self) -> str:
        """The source decides what this pass does; `strict`, only what becomes of a failure."""
        return source_digest()


@dataclass
class LoweringPass(CustomGraphPass):
    """Makes kernels, or what Inductor compiles, of the markers in a forward, backward or inference graph."""

    options: Options
    dump: Dump | None = None
    half: str = "forward"  # which graph comes next, and what became of the last one
    lowered: Lowered | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place."""
        if has_states(graph):
            self.lowered = _lower_optimizer(graph, self.options, self.dump)
            return
        on_gpu = device_of(graph).type == "cuda"
        executor = "triton" if on_gpu and self.options.kernels == "generated" else "inductor"
        self.lowered = (self.lowered or Lowered()) + _lower(graph, executor, self.options, self.half, self.dump)
        call_matmuls.keep_strides(graph)

    def uuid(self) -> str:
        """The source and the options decide what this pass does."""
        return hashlib.sha256(repr((source_digest(), self.options)).encode()).hexdigest()


def _lower_optimizer(graph: fx.Graph, options: Options, dump: Dump | None) -> Lowered:
    """Run the passes of optimizer graphs; where one fails, every operation of the optimizer loads and stores states."""
    backup = Snapshot(graph)
    try:
        updates = run_optimizer(graph, dump.observer("optimizer", graph) if dump else None, options.verify)
    except Exception as error:
        if dump:
            dump.failed("optimizer", error, graph, [step.name for step in OPTIMIZER])
        if options.strict:
            raise
        restore_graph(graph, backup.graph())
        skip_overflow.run(graph, skip_overflow.overflow_of(graph))
        failures.warn(error, graph, options, "Its updates run operator by operator, storing states in between")
        return Lowered(failure=failures.first_line(error))
    trace.warn_of_unmerged(updates)
    return Lowered(updates=updates)


def _lower(graph: fx.Graph, executor: str, options: Options, half: str, dump: Dump | None = None) -> Lowered:
    """Run the passes after the cut; where one fails, Inductor (or the operators) take the markers as they are."""
    backup = Snapshot(graph)
    run = run_after_cut if options.verify else functools.partial(run_after_cut, check=False)
    if dump:
        dump.stage(half, "cut", graph)
        run = functools.partial(run, observe=dump.observer(half, graph))
    try:
        return run(graph, executor, half)
    except Exception as error:
        if dump:
            dump.failed(half, error, graph, [step.name for step in AFTER_CUT if executor in step.executors])
        if options.strict:
            raise
        restore_graph(graph, backup.graph())
        failures.warn(error, graph, options, "Its casts are compiled without generated kernels")
        if executor == "triton":
            run(graph, "inductor", half)
        return Lowered(failure=failures.first_line(error))


def _guard_identity(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Let no other model run this graph: its delayed scales know the histories of this one only."""
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(x, torch.nn.Parameter) and getattr(node, "_dynamo_source", None) is not None:
            install_guard(node._dynamo_source.make_guard(GuardBuilder.ID_MATCH))
            return


def _inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Input]:
    inputs = []
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        is_buffer = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        inputs += [Input(isinstance(x, torch.nn.Parameter), is_buffer, node.name) for x in tree_leaves(given)]
    return inputs


def _input_index(placeholder: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the joint graph is (None: a gradient, a seed, …)."""
    desc = placeholder.meta.get("desc")
    while desc is not None and not hasattr(desc, "idx"):
        desc = getattr(desc, "base", None)
    return None if desc is None or "Tangent" in type(placeholder.meta["desc"]).__name__ else desc.idx


def _inductor_settings(options: Options, of_optimizer: bool = False) -> dict[str, Any]:
    settings = dict(list_mode_options(options.mode)) if options.mode else {}
    settings["allow_buffer_reuse"] = False  # a buffer kept for reuse later in backward is one that nobody else can have
    if of_optimizer:  # step counts and what is computed of them: one kernel, not one for each parameter
        settings |= {"combo_kernels": True, "combo_kernels_autotune": 0}
    if options.dump:  # on a hit no pass runs, and there would be nothing to write
        settings["force_disable_caches"] = True
    if options.executor == "eager":  # Inductor's own random operators ignore their seed when run eagerly
        settings["fallback_random"] = True
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and inductor_config.cpp.simdlen is None:
        settings["cpp.simdlen"] = (
            256  # Inductor's C++ of 512 bits transposes tiles of BF16 wrongly; each backward has some
        )
    return settings


def _compile_half(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    lowering: LoweringPass,
    record: Record,
    **settings: Any,
) -> Compiled:
    """Inductor, and what became of this half: the lowering pass says so, or what was kept when it ran."""
    lowering.half, lowering.lowered = _half(settings), None
    keep_strides_of_bases(gm)
    text = "".join(graph_text(body.graph) for body in nested_regions.bodies(gm))
    key = hashlib.sha256(f"{text}{lowering.uuid()}".encode()).hexdigest()
    try:
        compiled: Any = compile_fx_inner(gm, example_inputs, **settings)
    except Exception as error:
        if lowering.dump:
            lowering.dump.failed(lowering.half, error, gm.graph, ["inductor"])
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
    """Which graph compile_fx hands to its inner compiler."""
    if settings.get("is_backward"):
        return "backward"
    return "inference" if settings.get("is_inference") else "forward"


def _run_eagerly(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    lowering: LoweringPass,
    record: Record,
    **settings: Any,
) -> Compiled:
    """An executor that runs the graph node by node. It takes its arguments as one list, and empties it."""
    half, options, dump = _half(settings), lowering.options, lowering.dump
    lowered = Lowered()
    for body in nested_regions.bodies(gm):
        if has_states(body.graph):
            lowered += _lower_optimizer(body.graph, options, dump)
        elif options.kernels == "generated":
            lowered += _lower(body.graph, "operators", options, half, dump)
        elif dump:
            dump.stage(half, "cut", body.graph)
        for view in body.graph.find_nodes(op="call_function", target=aten.view.default):
            view.target = aten.reshape.default  # an attention's result may not lie in memory as its fake does
        body.recompile()
    record.add_half(half, lowered)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return gm.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol for callables that free their inputs
    return run
