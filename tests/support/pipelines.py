"""Passes of the pipeline changed, added, left out or watched for a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import fx

from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.run_passes import Pass
from fp8compile.passes.core.stages import DynamoGraph, HalfGraph, OptimizerGraph, Stage
from fp8compile.passes.optimizer import skip_overflow

Run = Callable[[Any], None]
_run_stage = pipeline.run_stage  # which nobody looks at


def names_of(stage: Stage) -> list[str]:
    """Return the names of the passes of a stage, in order, without those that only measure."""
    return [p.name for p in pipeline.PIPELINE if p.stage is stage and p.when is not pipeline.watches]


def replace_pass(monkeypatch: pytest.MonkeyPatch, name: str, run: Run) -> None:
    """Let `run` be what the pass `name` does."""
    wrap_pass(monkeypatch, name, lambda _: run)


def wrap_pass(monkeypatch: pytest.MonkeyPatch, name: str, wrap: Callable[[Run], Run]) -> None:
    """Let what `wrap` makes of the pass `name` be what it does."""
    assert any(p.name == name for p in pipeline.PIPELINE), f"no pass is called {name}"
    steps = [dataclasses.replace(p, run=wrap(p.run)) if p.name == name else p for p in pipeline.PIPELINE]
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(steps))


def look_after(monkeypatch: pytest.MonkeyPatch, name: str, look: Run) -> None:
    """Let `look` see what the pass `name` has made."""

    def wrap(run: Run) -> Run:
        def both(c: Any) -> None:
            run(c)
            look(c)

        return both

    wrap_pass(monkeypatch, name, wrap)


def add_pass(monkeypatch: pytest.MonkeyPatch, stage: Stage, name: str, run: Run, first: bool = False) -> None:
    """Let a pass be the last, or the first, of all."""
    new = (Pass(name, stage, run, "a test"),)
    steps = (*new, *pipeline.PIPELINE) if first else (*pipeline.PIPELINE, *new)
    monkeypatch.setattr(pipeline, "PIPELINE", steps)


def drop_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leave the pass `name` out."""
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(p for p in pipeline.PIPELINE if p.name != name))


def look_after_stage(monkeypatch: pytest.MonkeyPatch, stage: Stage, look: Run) -> None:
    """Let `look` see what the passes of a stage have made of a graph."""
    _look(monkeypatch, stage, lambda _: None, look)


def look_before_stage(monkeypatch: pytest.MonkeyPatch, stage: Stage, look: Run) -> None:
    """Let `look` see, and change, what the passes of a stage are given."""
    _look(monkeypatch, stage, look, lambda _: None)


def _look(monkeypatch: pytest.MonkeyPatch, stage: Stage, before: Run, after: Run) -> None:
    run_stage = pipeline.run_stage

    def watched(c: Any, observe: Any = None) -> None:
        if c.stage is stage:
            before(c)
        run_stage(c, observe)
        if c.stage is stage:
            after(c)

    monkeypatch.setattr(pipeline, "run_stage", watched)


def run_half(graph: fx.Graph, executor: str, half: str = "forward") -> HalfGraph:
    """Run the passes of a forward or backward graph; returns what they were given, with what they have noted."""
    c = HalfGraph(graph, Options.parse({}), half, executor)
    _run_stage(c)
    return c


def dynamo_graph(gm: fx.GraphModule, inputs: Sequence[Any] = ()) -> DynamoGraph:
    """Return what passes on Dynamo's graph are given of an optimizer's step."""
    return DynamoGraph(gm.graph, Options.parse({}), gm, inputs, is_step=True)


def optimizer_graph(graph: fx.Graph) -> OptimizerGraph:
    """Return what passes on an optimizer's graph are given."""
    return OptimizerGraph(graph, Options.parse({}), skip_overflow.overflow_of(graph))
