"""Trace the step of stand-ins: through Dynamo, AOTAutograd and Inductor's own passes, as any step, but to no code.

What comes out is the graph that `passes/optimizer/` would get of two such parameters, and what each of its inputs is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass  # the base of the hook in which tracing ends
from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.optim import Optimizer

from fp8compile.optimizer.shared_step.roles import SETTING, UNSCALE, NotAlikeError, Role, roles_of
from fp8compile.optimizer.shared_step.stand_ins import fresh_step
from fp8compile.optimizer.trace import let_numbers_change, name_sources, take_as_constants, trace_again
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.stages import DynamoGraph, UnscaledGradients
from fp8compile.torch_hooks.calls.compiled_calls import reading_numbers
from fp8compile.torch_hooks.inductor.inductor_settings import WITHOUT_JOINT_PASSES, inductor_settings

UNSCALED_BY = ("inverse", "overflow")


@dataclass
class Traced:
    """A graph before the passes of optimizers, and the roles of its inputs, in their order."""

    graph: fx.Graph
    roles: list[Role]


class _TracedError(Exception):
    """Ends a compilation where its graph is known."""


class _Grab(CustomGraphPass):
    """The hook after Inductor's own passes."""

    graph: fx.Graph | None = None

    def __call__(self, graph: fx.Graph) -> None:
        self.graph = graph
        raise _TracedError

    def uuid(self) -> None:
        """Return nothing: what is traced is kept in no cache."""


@dataclass
class _Tracer:
    """A backend that keeps the graph, and what it is called with."""

    options: Options
    moving: Sequence[str]
    unscaling: UnscaledGradients | None
    sources: list[str] = field(default_factory=list)
    graphs: list[fx.Graph] = field(default_factory=list)
    outer: list[Any] = field(default_factory=list)
    inner: list[Any] = field(default_factory=list)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keep the graph; the function that is returned keeps its arguments."""
        if let_numbers_change(self.moving):
            trace_again(gm)
        pipeline.run_stage(c := DynamoGraph(gm.graph, self.options, gm, inputs, is_step=True, unscaling=self.unscaling))
        name_sources(gm, c.opened, c.added)
        nodes = gm.graph.find_nodes(op="placeholder")
        self.sources = [getattr(getattr(n, "_dynamo_source", None), "name", "") for n in nodes]
        grab = _Grab()
        settings = inductor_settings(self.options, of_optimizer=True)
        settings |= {"post_grad_custom_post_pass": grab, "fx_graph_cache": False, **WITHOUT_JOINT_PASSES}
        compiled = compile_fx(gm, inputs, inner_compile=self._keeping(grab), config_patches=settings)  # type: ignore[arg-type]

        def run(*args: Any) -> Any:
            self.outer = list(args)
            return compiled(*args)  # type: ignore[operator]

        return run

    def _keeping(self, grab: _Grab) -> Callable[..., Any]:
        def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
            graph = gm.graph
            remove_noop_ops(graph)  # of Inductor's joint passes the two that rules of optimizers need
            constant_fold_uniform_value(gm)
            if self.options.executor != "eager":
                graph = _after_inductors_passes(gm, inputs, settings, grab)
            self.graphs.append(graph)

            def run(args: list[Any]) -> Any:
                self.inner = list(args)
                args.clear()
                return [None] * len(graph.output_node().args[0])  # type: ignore[arg-type]

            vars(run)["_boxed_call"] = True  # AOTAutograd's protocol for callables that free their inputs
            return run

        return inner_compile


def _after_inductors_passes(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], grab: _Grab
) -> fx.Graph:
    try:
        compile_fx_inner(gm, inputs, **settings)
    except Exception:
        if grab.graph is None:
            raise
    assert grab.graph is not None, "Inductor calls the hook after its passes"
    return grab.graph


def trace(
    opt: Optimizer, options: Options, moving: Sequence[str], numbers: tuple[torch.Tensor, torch.Tensor] | None
) -> Traced:
    """Return the graph of a step of `opt`, an optimizer of stand-ins.

    moving: settings that are numbers. numbers: by which gradients are unscaled. Raises `NotAlikeError` where there is
    more than one graph, or an input of which nobody knows what it is.
    """
    parameters = opt.param_groups[0]["params"]
    unscaling = UnscaledGradients(frozenset(id(p.grad) for p in parameters), numbers) if numbers else None
    tracer = _Tracer(options, moving, unscaling)
    known: dict[int, Role] = {id(x): Role(UNSCALE, name) for name, x in zip(UNSCALED_BY, numbers or (), strict=False)}
    for name, value in opt.param_groups[0].items():
        known |= {id(x): Role(SETTING, name, part) for part, x in _tensors(value)}
    for i, p in enumerate(parameters):
        known |= roles_of(p, opt.state.get(p, {}), i)
    step, settings = fresh_step(opt), opt.param_groups[0].items()
    unread = [k for k, v in settings if type(v) is float and not v and k not in (*moving, "lr")]
    take_as_constants(step.__name__, unread)
    undo = reading_numbers()
    try:
        with torch.no_grad():
            torch.compile(step, backend=tracer.backend)(opt)
    finally:
        undo()
    if len(tracer.graphs) != 1:
        raise NotAlikeError(f"its step is compiled in {len(tracer.graphs)} pieces")
    known |= {id(x): _setting(name) for x, name in zip(tracer.outer, tracer.sources, strict=True) if id(x) not in known}
    if unknown := [i for i, x in enumerate(tracer.inner) if id(x) not in known]:
        raise NotAlikeError(f"its step reads {len(unknown)} tensors that are neither states nor settings")
    return Traced(tracer.graphs[0], [known[id(x)] for x in tracer.inner])


def _tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, tuple):
        return [(str(i), x) for i, x in enumerate(value) if isinstance(x, torch.Tensor)]
    return []


def _setting(source: str) -> Role:
    """Return the role of an input that is a number of a group, by the name that Dynamo has for it."""
    parts = source.replace("]", "").replace("'", "").split("[")
    place = parts.index("param_groups") if "param_groups" in parts else _after(parts, ".param_groups")
    if place is None or len(parts) < place + 3:
        raise NotAlikeError(f"its step reads {source or 'an input without a name'}")
    return Role(SETTING, parts[place + 2], parts[place + 3] if len(parts) > place + 3 else "")


def _after(parts: list[str], end: str) -> int | None:
    return next((i for i, x in enumerate(parts) if x.endswith(end)), None)
