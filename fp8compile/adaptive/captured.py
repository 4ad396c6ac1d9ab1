"""A graph as Dynamo gave it, kept to be compiled again with other options, outside of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
from torch import SymInt, fx
from torch._guards import TracingContext, tracing  # what Dynamo knew of the graph: compiled again, it must be the same

from fp8compile.options import Options
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.plan.plan import Plan

Compiled: TypeAlias = Callable[..., Any]
Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any], Options], tuple[Compiled, list[Plan]]]


class CannotRecompileError(Exception):
    """A graph cannot be compiled again, for this reason."""


@dataclass(frozen=True)
class Conditions:
    """Check what a graph compiled outside of Dynamo needs of symbolic sizes, as no guard of Dynamo does.

    of: what must be true. positions: of its symbols among the inputs of the graph. holds: answers for sizes so far.
    """

    of: tuple[sympy.Basic, ...]
    positions: dict[sympy.Basic, int]
    holds: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Return True if the sizes among the inputs meet all conditions."""
        sizes = tuple(int(inputs[position]) for position in self.positions.values())
        if sizes not in self.holds:
            values = {symbol: sympy.Integer(n) for symbol, n in zip(self.positions, sizes, strict=True)}
            self.holds[sizes] = all(condition.xreplace(values) == sympy.true for condition in self.of)
        return self.holds[sizes]

    def __str__(self) -> str:
        return " and ".join(map(str, self.of))


@dataclass
class CapturedGraph:
    """A copy of a graph, and what is needed to compile it again."""

    gm: fx.GraphModule
    inputs: list[Any]  # fake, as the graph has them
    context: TracingContext | None
    compile: Compile
    _known: int | None = field(default=None, init=False)  # the guards that Dynamo checks

    @staticmethod
    def of(gm: fx.GraphModule, compile: Compile) -> CapturedGraph:
        """Return a copy of `gm`, which compiling changes."""
        inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        return CapturedGraph(_copy(gm), inputs, TracingContext.try_get(), compile)

    def again(self, options: Options) -> tuple[Compiled, list[Plan], Conditions | None]:
        """Compile with other options; also return what must hold of symbolic sizes, None if Dynamo checks all of it.

        Raises `CannotRecompileError`.
        """
        if self.context is None:
            raise CannotRecompileError("the graph did not come from Dynamo")
        if self._known is None:
            self._known = len(_guards(self.context))
        with tracing(self.context):
            compiled, plans = self.compile(_copy(self.gm), self.inputs, options)
        # all since Dynamo: what an earlier compilation has added is known to this one
        return compiled, plans, self._conditions(_guards(self.context)[self._known :])

    def _conditions(self, expressions: Sequence[sympy.Basic]) -> Conditions | None:
        """Return the conditions as the inputs can be asked for them; raise `CannotRecompileError` where they cannot."""
        if not expressions:
            return None
        given = {x.node.expr: i for i, x in enumerate(self.inputs) if isinstance(x, SymInt)}
        symbols = sorted(set[Any]().union(*(e.free_symbols for e in expressions)), key=str)
        if not all(symbol in given for symbol in symbols):
            raise CannotRecompileError("it would specialise symbolic sizes, which Dynamo does not check any more")
        return Conditions(tuple(dict.fromkeys(expressions)), {symbol: given[symbol] for symbol in symbols})


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


def _guards(context: TracingContext) -> list[sympy.Basic]:
    env = context.fake_mode.shape_env if context.fake_mode is not None else None
    return [guard.expr for guard in env.guards] if env is not None else []
