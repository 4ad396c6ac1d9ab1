"""The backend: `torch.compile(model, backend="fp8", options={…})`.

The front door only: it parses options, looks at what Dynamo has traced (a model, or the step of an optimizer), and has
the graph compiled (`fp8compile/compile_graph.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.guards import GuardBuilder, install_guard  # a delayed scale's history belongs to one model
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves  # under compiled autograd an input is a list

from fp8compile import delayed, embedding_tables, weight_uses
from fp8compile.adaptive.adaptive_graph import AdaptiveGraph
from fp8compile.compile_graph import compile_graph
from fp8compile.cuda_capture import is_to_be_captured
from fp8compile.errors import FreedWeightError, OptionError
from fp8compile.optimizer.shared_step import shared_step
from fp8compile.optimizer.step_graph import prepare_step
from fp8compile.optimizer.trace import traced_optimizer
from fp8compile.options import Options
from fp8compile.passes.core.compilation import Input
from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.torch_hooks import dynamo_stage
from fp8compile.torch_hooks.calls import compiled_calls, trainers
from fp8compile.torch_hooks.calls.graph_runs import counted
from fp8compile.torch_hooks.calls.unwrapped_errors import unwrapped
from fp8compile.torch_hooks.modules import backward_hooks
from fp8compile.torch_hooks.patches import apply_patches

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
    if is_to_be_captured():
        parsed = _for_a_captured_step(parsed)
    example_inputs, with_hooks = backward_hooks.insert(gm, example_inputs)
    namespace = ""
    opt = traced_optimizer(gm, example_inputs)
    names = dynamo_stage.name_modules(gm, example_inputs, parsed) if opt is None else {}
    if opt is None:
        parsed = dynamo_stage.run_model_passes(DynamoGraph(gm.graph, parsed, gm, example_inputs))
        trainers.warn_of_fused_optimizer()
    if parsed.recipe.is_delayed or (parsed.adaptive is not None and opt is None):
        _guard_identity(gm, example_inputs)
    if parsed.recipe.is_delayed:
        trains = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
        namespace = delayed.namespace(example_inputs, trains)
    embedding_tables.note_tables(gm.graph, example_inputs)
    known = tuple(_inputs(gm, example_inputs, names, None if opt is not None else parsed))
    if any(x.freed for x in known):
        example_inputs = [weight_uses.as_it_lay(x) for x in example_inputs]
    if parsed.adaptive is not None and opt is None:
        compile_again = functools.partial(compile_graph, known=known, namespace=namespace)
        adaptive = AdaptiveGraph(gm, example_inputs, parsed, compile_again)
        return counted(with_hooks(adaptive), [adaptive.plan])
    states = prepare_step(opt, gm, example_inputs, parsed) if opt is not None else None
    compiled, made = compile_graph(gm, example_inputs, parsed, known=known, namespace=namespace, states=states)
    return counted(with_hooks(compiled), made, host_launches=not parsed.replays)


def _for_a_captured_step(options: Options) -> Options:
    """Return the options of what `capture_step` compiles; raises `OptionError` where it replays by itself."""
    if options.replays and not options.captured:
        raise OptionError(
            "a step of capture_step cannot hold a model that is compiled for CUDA graphs of its own "
            "(mode='reduce-overhead', 'max-autotune', or inductor={'triton.cudagraphs': True}): leave that out"
        )
    return replace(options, captured=True, keep_casts=False)  # a replay casts what it has written itself


def _is_fp8(backend: Any) -> bool:
    """Return whether a backend, as Dynamo holds it, is this one beneath torch's wrappers and options."""
    while backend is not None and backend is not fp8:
        beneath = (getattr(backend, name, None) for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"))
        backend = next((x for x in beneath if x is not None), None)
    return backend is fp8


def _take_step(
    opt: Optimizer, given: Mapping[str, Any], has_closure: bool, as_whole: bool
) -> Callable[[], None] | None:
    """Begin a step of `opt` that takes one rule for all parameters of a kind; return what ends it, or None."""
    try:
        options = Options.parse(given.get("options"), given.get("mode"))
    except OptionError:
        return None  # the backend raises it where the user sees it
    return shared_step.take_step(opt, options, has_closure, as_whole)


compiled_calls.watch(fp8, _take_step)
apply_patches(_is_fp8)


def _guard_identity(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Let no other model run this graph, even one that shares parameters: it knows the casts of this one only."""
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(x, torch.nn.Parameter) and getattr(node, "_dynamo_source", None) is not None:
            install_guard(node._dynamo_source.make_guard(GuardBuilder.ID_MATCH))


def _inputs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], names: Mapping[str, str], options: Options | None
) -> list[Input]:
    """Return what each input of Dynamo's graph is in the user's terms.

    names: whole ones of parameters, where Dynamo's begin inside of the model. options: of a model's graph.
    """
    inputs = []
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        is_buffer = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        for x in tree_leaves(given):
            is_kept = options is not None and _is_kept(x, options) and not _is_gathered(node)
            is_parameter, is_table = isinstance(x, torch.nn.Parameter), embedding_tables.is_table(x)
            freed = weight_uses.name_of(x) if is_parameter and weight_uses.is_freed(x) else ""
            if freed and not is_kept:
                raise FreedWeightError(
                    f"{freed} was freed (fp8compile.free_weights), and this graph needs it as it was: for "
                    "gradients, or in a model that is not frozen"
                )
            name = names.get(node.name, node.name)
            is_trained = is_kept and x.requires_grad
            inputs.append(Input(is_parameter, is_buffer, name, is_kept, is_trained, freed, is_table))
    return inputs


def _is_kept(x: Any, options: Options) -> bool:
    """Return True for a parameter whose casts are kept from one call to the next."""
    return type(x) is torch.nn.Parameter and (options.keep_casts if x.requires_grad else options.frozen)


def _is_gathered(placeholder: fx.Node) -> bool:
    """Return True for a parameter of an FSDP module: its memory is filled anew in each call, which nobody counts."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source is not None and source.guard_source.is_fsdp_module()
