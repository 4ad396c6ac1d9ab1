"""The automatic schedule at run time: options={"schedule": "auto"}.

A graph is kept as Dynamo gave it, and compiled anew whenever `fp8compile/adaptive/policy.py` moves something; Dynamo's
own code and caches stay as they are. Each version exists twice: as it trains, and *watched*, with operators that
measure its casts (`passes/matmul/observe_casts.py`). A look is one step through the watched form, so that between looks
nothing is measured and nothing is slower. Its evidence is read at the next step, when its backward pass has run.

Steps are executions of a training graph. A graph for inference follows the training graph of the same parameters: it
evaluates what is trained. `schedules()` gives all of this process, `scheduled_plan()` what they have come to.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing  # what Dynamo knew of the graph: compiled again, it must be the same

from fp8compile import devices
from fp8compile.adaptive.policy import Ladders, Move, keyed
from fp8compile.adaptive.settings import Schedule
from fp8compile.insight.explanation import Explanation
from fp8compile.options import KEEP_ALL, Options
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.plan import cast_statistics, overrides, store
from fp8compile.plan.cast_statistics import Row
from fp8compile.plan.overrides import Edits, SavedKey, saved_key
from fp8compile.plan.plan import Plan
from fp8compile.recipe import Recipe
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.user_frame import warn_user

NAME = "the schedule"
PATIENCE = 4  # executions that a look waits for the backward pass of its step
WITHOUT_CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}  # a replay calls nothing
Compiled = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any], Options], tuple[Compiled, list[Plan]]]
logger = logging.getLogger("fp8compile")
_all: list[weakref.ref[Scheduled]] = []


class _CannotError(Exception):
    """Why a graph cannot be compiled again."""


@dataclass
class Captured:
    """A graph as Dynamo gave it, and what is needed to compile it again."""

    gm: fx.GraphModule
    inputs: list[Any]  # fake, as the graph has them
    context: TracingContext | None
    compile: Compile

    @staticmethod
    def of(gm: fx.GraphModule, compile: Compile) -> Captured:
        """A copy of `gm`, which compiling changes."""
        inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        return Captured(_copy(gm), inputs, TracingContext.try_get(), compile)

    def again(self, options: Options) -> tuple[Compiled, list[Plan]]:
        """Compile with other options, outside of Dynamo. Raises `_CannotError` instead of specialising further."""
        if self.context is None:
            raise _CannotError("the graph did not come from Dynamo")
        known = _guards(self.context)
        with tracing(self.context):
            result = self.compile(_copy(self.gm), self.inputs, options)
        if _guards(self.context) != known:
            raise _CannotError("it would specialise symbolic sizes, which Dynamo does not check any more")
        return result


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with all that Dynamo says of it: metadata, and attributes of the module and of its placeholders."""
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


@dataclass
class Version:
    """One way to run the graph. Both forms are compiled when they are first needed."""

    options: Options
    plan: Plan
    plain: Compiled
    watched: Compiled | None = None


class Scheduled:
    """What a backend returns for a graph under a schedule: calls the version of the hour.

    step: executions so far. moves: all moves, with their evidence. plan: how it runs now.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options, compile: Compile):
        assert options.schedule is not None
        self.settings: Schedule = options.schedule
        self.step = 0
        self.moves: list[Move] = []
        self.why_done = ""
        self._captured = Captured.of(gm, compile)
        self._base = replace(options, schedule=None)
        self._owner = _first_parameter(inputs)
        self._name = f"schedule{len(_all)}"
        self._saved: dict[SavedKey, str] = dict(options.plan.saved) if options.plan is not None else {}
        self._ladders = Ladders(self.settings, _has_groups(inputs))
        self._looking = self._waited = 0  # the look that waits for its evidence began at this step, so many steps ago
        self._next_look, self._gap = 0, 1
        self._versions = 0  # FP8 ones
        bf16 = replace(self._base, recipe=Recipe("bf16", None, None, None), save=KEEP_ALL)
        first = bf16 if self.settings.bf16_steps else self._base
        compiled, made = compile(gm, inputs, first)  # within Dynamo, whose guards may grow
        self._now = Version(first, made[-1] if made else Plan(), compiled)
        if first is self._base:
            self._begin()
        _all.append(weakref.ref(self))

    # ---- for people ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of what runs now; options={"plan": …} takes it."""
        return self._now.plan

    @property
    def is_training(self) -> bool:
        """Whether this graph has a backward half, and so makes its own moves."""
        return self.plan.graph == "training"

    @property
    def recompiles(self) -> int:
        """How often it was compiled anew because of moves."""
        return max(0, self._versions - 1)

    def __str__(self) -> str:
        end = f"; {self.why_done}" if self.why_done else ""
        counts = f"{self.recompiles} recompiles, {len(self.moves)} moves"
        head = f"{self.plan.graph} graph after {self.step} steps: {counts}{end}"
        return "\n".join([head, *(f"  {move}" for move in self.moves)])

    # ---- running ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """What the graph computes."""
        if not self.is_training:
            return self._following().plain(*args)
        run = self._advance()
        self.step += 1
        return run(*args)

    def _advance(self) -> Compiled:
        """The compiled form for this step."""
        if self.step == self.settings.bf16_steps and self.step:
            self._start_fp8()
        if self.step < self.settings.bf16_steps or self.why_done:
            return self._now.plain
        if self._looking:
            self._read()
        if self.step < self._next_look or self._looking or self.why_done:
            return self._now.plain
        watched = self._watched()
        if watched is None:
            return self._now.plain
        self._looking, self._waited = self.step + 1, 0
        cast_statistics.start(self._name, 1)
        return watched

    def _watched(self) -> Compiled | None:
        """The form of this version that measures; None, and the schedule is over, where it cannot be compiled."""
        if self._now.watched is None:
            options = self._now.options
            mode = WITHOUT_CUDA_GRAPHS.get(options.mode or "", options.mode)
            with store.collected():
                version = self._version(replace(options, watch=self._name, mode=mode, dump=None))
            self._now.watched = version.plain if version is not None else None
        return self._now.watched

    def _read(self) -> None:
        """Decide on what the last look measured, when all of it is there."""
        rows = [row for row in cast_statistics.rows(self._name) if row.steps]
        casts = sum(1 for _ in self.plan.converted) * 2
        self._waited += 1
        if len([r for r in rows if r.role != "saved"]) < casts and self._waited < PATIENCE:
            return
        cast_statistics.stop(self._name)
        looked, self._looking = self._looking - 1, 0
        if self._decide(rows):
            self._gap, self._next_look = 1, self.step
        else:
            self._gap = min(self._gap * 2, self.settings.every)
            self._next_look = looked + self._gap

    def _decide(self, rows: Sequence[Row]) -> bool:
        """Move what should be moved; whether anything was."""
        plan, moves = self._ladders.look(self.plan, rows, self.step)
        if not moves:
            return False
        if self.recompiles >= self.settings.recompiles:
            self._end(f"{self.settings.recompiles} recompiles are used up, and {len(moves)} more moves were due")
            return False
        saved = {**self._saved, **dict(_moved_saved(plan))}
        options = replace(
            self._base, plan=Edits(NAME, overrides.load(replace(plan, saved=[])).graphs, tuple(saved.items()))
        )
        version = self._version(options)
        if version is None:
            return False
        self._now, self._saved = version, saved
        self._versions += 1
        self.moves += moves
        for move in moves:
            logger.info("schedule, %s", move)
        return True

    def _end(self, why: str) -> None:
        self.why_done = why
        if why.startswith("not compiled"):
            warn_user(f"fp8: the schedule of a graph stays as it is: {why}.")
        logger.info("schedule: %s", why)

    # ---- versions -----------------------------------------------------------------------------------------------

    def _version(self, options: Options) -> Version | None:
        """The graph compiled with other options; None, and the schedule is over, where that cannot be."""
        try:
            compiled, made = self._captured.again(options)
        except _CannotError as error:
            self._end(f"not compiled again: {error}")
        except Exception as error:
            if options.strict:
                raise
            self._end(f"not compiled again: {failures.first_line(error)}")
        else:
            return Version(options, made[-1] if made else Plan(), compiled)
        return None

    def _start_fp8(self) -> None:
        version = self._version(self._base)
        if version is not None:
            self._now = version
            self._begin()

    def _begin(self) -> None:
        """The version of the options themselves is there."""
        self._versions = 1
        self._ladders.settle(self.plan)
        if self.is_training and not self.plan.converted:
            self._end("nothing of it is in FP8")

    def _following(self) -> Version:
        """The version of an inference graph: with the options of its training graph, where there is one."""
        leader = next((s for s in reversed(schedules()) if s.is_training and s._leads(self)), None)
        options = leader._now.options if leader is not None else self._base
        if options != self._now.options and not self.why_done:
            self._now = self._version(options) or self._now
        return self._now

    def _leads(self, other: Scheduled) -> bool:
        mine, theirs = (s._owner() if s._owner is not None else None for s in (self, other))
        return mine is not None and mine is theirs and _outputs(self.plan) == _outputs(other.plan)


def schedules() -> list[Scheduled]:
    """The graphs of this process that run under a schedule, oldest first; `moves` of each says what it did, and why."""
    return [s for ref in _all if (s := ref()) is not None]


def scheduled_plan() -> Explanation:
    """What the schedules of all training graphs have come to; options={"plan": …} takes it, or its `to_json()`.

    Raises `LookupError` where no graph trains under a schedule.
    """
    found = [s.plan for s in schedules() if s.is_training]
    if not found:
        raise LookupError('no graph trains under options={"schedule": "auto"}: call the compiled model once')
    return Explanation(found)


def reset() -> None:
    """Forget all schedules; graphs that run go on."""
    _all.clear()


def _first_parameter(inputs: Sequence[Any]) -> weakref.ref[torch.nn.Parameter] | None:
    return next((weakref.ref(x) for x in inputs if isinstance(x, torch.nn.Parameter)), None)


def _has_groups(inputs: Sequence[Any]) -> bool:
    kinds = {x.device for x in inputs if isinstance(x, torch.Tensor)}
    device = devices.describe(next((d for d in kinds if d.type != "cpu"), torch.device("cpu")))
    return device.emulated or device.blockwise


def _moved_saved(plan: Plan) -> list[tuple[SavedKey, str]]:
    """Keys and forms of the saved tensors that a look moved."""
    seen: dict[SavedKey, int] = {}
    found = []
    for row in plan.saved:
        first = saved_key(row.path, row.source, row.dtype, row.shape, 0)
        occurrence = seen[first] = seen.get(first, -1) + 1
        if row.reason.startswith(overrides.SCHEDULED):
            found.append(((*first[:4], occurrence), row.form))
    return found


def _outputs(plan: Plan) -> set[Any]:
    return {member for row, _, members in keyed(plan.matmuls) if row.role == "output" for member in members}
