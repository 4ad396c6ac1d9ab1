"""The protocol of a pass, and the loop that runs passes: run, tidy up, verify, show.

A pass is a module with a function `run(c)`, which rewrites `c.graph` in place; `c` is the graph of its stage with what
is known there (`passes/core/stages.py`). `passes/pipeline.py` lists all of them, with the rules of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fp8compile.errors import VerificationError
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.stages import Stage, StageGraph

Observer = Callable[[str, str], None]  # is given the name of a pass, and the graph after it as text
Check = Callable[[str], None]  # raises VerificationError; is given the name of the pass that has just run


def always(_: StageGraph) -> bool:
    """Return True."""
    return True


def do_nothing(_: StageGraph) -> None:
    """Leave a graph as it is."""


@dataclass(frozen=True)
class Pass:
    """One step: its name, the stage at which it runs, what it does to that stage's graph, why it stands at its place.

    when: returns True for a graph to which it has something to do.
    """

    name: str
    stage: Stage
    run: Callable[[Any], None]
    why: str
    when: Callable[[Any], bool] = always


@dataclass(frozen=True)
class Rules:
    """The rules of a stage.

    verifier: looks at a graph before the first pass, and returns the check that runs after every pass.
    prepare, tidy: done before the first pass, and after every one. finish: done at the end, even if a pass raises.
    shows_input: observers see the graph as it comes.
    """

    verifier: Callable[[Any], Check]
    prepare: Callable[[Any], None] = do_nothing
    tidy: Callable[[Any], None] = do_nothing
    finish: Callable[[Any], None] = do_nothing
    shows_input: bool = False


def run_passes(passes: Iterable[Pass], c: StageGraph, rules: Rules, observe: Observer | None = None) -> None:
    """Run those of `passes` that have something to do on `c`, verifying after each unless an option says otherwise.

    Raises `VerificationError`, which names the stage and the pass, where one breaks a rule.
    """
    try:
        _run_each(passes, c, rules, observe)
    finally:
        rules.finish(c)


def _run_each(passes: Iterable[Pass], c: StageGraph, rules: Rules, observe: Observer | None) -> None:
    rules.prepare(c)
    check = rules.verifier(c) if c.options.verify else None
    if observe and rules.shows_input:
        observe("input", graph_text(c.graph))
    for step in passes:
        if not step.when(c):
            continue
        c.running = step.name
        step.run(c)
        rules.tidy(c)
        if check:
            _verify(check, c)
        if observe:
            observe(step.name, graph_text(c.graph))


def _verify(check: Check, c: StageGraph) -> None:
    try:
        check(c.running)
    except VerificationError as error:
        raise VerificationError(f"{c.name} graph {error}") from error
