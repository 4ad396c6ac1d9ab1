"""A graph as Dynamo gave it, kept to be compiled again with other options, outside of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx
from torch._guards import TracingContext, tracing  # what Dynamo knew of the graph: compiled again, it must be the same

from fp8compile.options import Options
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.plan.plan import Plan

Compiled: TypeAlias = Callable[..., Any]
Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any], Options], tuple[Compiled, list[Plan]]]


class CannotRecompileError(Exception):
    """A graph cannot be compiled again, for this reason."""


@dataclass
class CapturedGraph:
    """A copy of a graph, and what is needed to compile it again."""

    gm: fx.GraphModule
    inputs: list[Any]  # fake, as the graph has them
    context: TracingContext | None
    compile: Compile

    @staticmethod
    def of(gm: fx.GraphModule, compile: Compile) -> CapturedGraph:
        """Return a copy of `gm`, which compiling changes."""
        inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        return CapturedGraph(_copy(gm), inputs, TracingContext.try_get(), compile)

    def again(self, options: Options) -> tuple[Compiled, list[Plan]]:
        """Compile with other options. Raises `CannotRecompileError` instead of specialising further."""
        if self.context is None:
            raise CannotRecompileError("the graph did not come from Dynamo")
        known = _guards(self.context)
        with tracing(self.context):
            result = self.compile(_copy(self.gm), self.inputs, options)
        if _guards(self.context) != known:
            raise CannotRecompileError("it would specialise symbolic sizes, which Dynamo does not check any more")
        return result


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy with all that Dynamo says of it: metadata, and attributes of the module and of its placeholders."""
    copy = fx.GraphModule(gm, copy_graph(gm.graph))
    for name, value in gm.__dict__.items():
        copy.__dict__.setdefault(name, value)
    copy.meta = dict(gm.meta)
    for old, new in zip(*(x.graph.find_nodes(op="placeholder") for x in (gm, copy)), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copy


def _guards(context: TracingContext) -> int:
    env = context.fake_mode.shape_env if context.fake_mode is not None else None
    return len(env.guards) if env is not None else 0
