"""The automatic mode at run time: options={"adaptive": "auto"}.

A graph is kept as Dynamo gave it, and compiled anew whenever `fp8compile/adaptive/policy.py` changes something;
Dynamo's own code and caches stay as they are. Each version exists twice: as it trains, and *watched*, with operators
that measure its casts (`passes/matmul/observe_casts.py`). A look is one step through the watched form, so that between
looks nothing is measured and nothing is slower. Its evidence is read at the next step, when its backward pass has run.

A graph that returns its loss is also looked at from outside: after a spike (`fp8compile/adaptive/loss_spikes.py`) some
steps run in BF16.

Steps are executions of a training graph. A graph for inference follows the training graph of the same parameters: it
evaluates what is trained. `adaptive_graphs()` gives all of this process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8compile import devices
from fp8compile.adaptive.captured import CannotRecompileError, CapturedGraph, Compile, Compiled, Conditions
from fp8compile.adaptive.choices import keyed
from fp8compile.adaptive.looks import Looks
from fp8compile.adaptive.loss_spikes import LossSpikes, loss_among
from fp8compile.adaptive.policy import Change, Policy, explain_again
from fp8compile.adaptive.ranks import Agreement, mean, ranks_of
from fp8compile.adaptive.settings import Adaptive
from fp8compile.model_identity import Parameters
from fp8compile.options import KEEP_ALL, Options
from fp8compile.plan import overrides, store
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.overrides import Overrides, SavedKey, saved_key
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import BF16, FP8
from fp8compile.recipe import Recipe
from fp8compile.torch_hooks import failures
from fp8compile.torch_hooks.calls.user_frame import warn_user

NAME = "the automatic mode"
WITHOUT_CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}  # a replay calls nothing
logger = logging.getLogger("fp8compile")
_all: list[weakref.ref[AdaptiveGraph]] = []


@dataclass
class Version:
    """One way to run the graph. conditions: on the sizes of its inputs, elsewhere the first version runs."""

    options: Options
    plan: Plan
    compiled: Compiled
    conditions: Conditions | None = None

    def runs(self, inputs: Sequence[Any]) -> bool:
        """Return True if this version computes what the graph says of inputs with these sizes."""
        return self.conditions is None or self.conditions.hold(inputs)


class AdaptiveGraph:
    """A graph in automatic mode, as the backend returns it: it calls the version of the hour.

    step: executions so far. changes: all changes, with their evidence. plan: how it runs now; replaced: how it ran
    before. measured: the casts that ran, as the last look saw them.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options, compile: Compile):
        assert options.adaptive is not None
        self.settings: Adaptive = options.adaptive
        self.step = 0
        self.changes: list[Change] = []
        self.replaced: list[Plan] = []
        self.measured: list[Row] = []
        self.why_done = ""
        self._captured = CapturedGraph.of(gm, compile)
        self._base = _alone_on_the_wire(replace(options, adaptive=None), self.settings)
        self._parameters = Parameters(inputs)
        self._name = f"adaptive{len(_all)}"
        self._saved: dict[SavedKey, str] = dict(options.plan.saved) if options.plan is not None else {}
        self._policy = Policy(self.settings, _has_groups(inputs))
        self._ranks = Agreement(ranks_of(self.settings.ranks), self._name)
        self._looks = Looks(self._name, self.settings.every, self._ranks)
        self._losses = LossSpikes(self.settings.spike)
        self._bf16: Version | None = None
        self._converts = False  # on any of the ranks a matmul is in FP8
        self._is_fixed = False  # no other version can be compiled
        self._is_partial = False  # sizes were seen that the version of the hour does not run with
        self._bf16_until = 0  # the step at which FP8 goes on
        self._bf16_steps = self.settings.spike_steps  # after the next spike
        self._versions = 0  # FP8 ones
        first = self._in_bf16() if self.settings.bf16_steps else self._base
        compiled, made = compile(gm, inputs, first)  # within Dynamo, whose guards may grow
        self._now = self._first = Version(first, made[-1] if made else Plan(), compiled)
        self._watched: Version | None = None  # the form of what runs now that measures
        if first is self._base:
            self._begin()
        else:
            self._bf16 = self._now
        _all.append(weakref.ref(self))

    # ---- for people ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of what runs now; options={"plan": …} takes it."""
        return self._now.plan

    @property
    def is_training(self) -> bool:
        """True if this graph has a backward half, and so makes its own changes."""
        return self.plan.graph == "training"

    @property
    def looks(self) -> int:
        """The number of steps that were measured."""
        return self._looks.done

    @property
    def recompiles(self) -> int:
        """The number of times that it was compiled anew because of changes."""
        return max(0, self._versions - 1)

    def __str__(self) -> str:
        end = f"; {self.why_done}" if self.why_done else ""
        counts = f"{self.recompiles} recompiles, {len(self.changes)} changes"
        head = f"{self.plan.graph} graph after {self.step} steps: {counts}{end}"
        return "\n".join([head, *(f"  {change}" for change in self.changes)])

    # ---- running ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Return what the graph computes."""
        if not self.is_training:
            return self._where_it_runs(self._following(), args).compiled(*args)
        version = self._advance(args)
        self.step += 1
        outputs = version.compiled(*args)
        if self.settings.spike and self._is_in_fp8() and (loss := loss_among(outputs)) is not None:
            observe_loss(loss, self)
        return outputs

    def _advance(self, inputs: Sequence[Any]) -> Version:
        """Return the version for this step."""
        if self.step == self.settings.bf16_steps and self.step:
            self._start_fp8()
        if self.step < self._bf16_until and (bf16 := self._bf16_version()) is not None:
            return self._where_it_runs(bf16, inputs)
        if self.step >= self.settings.bf16_steps and not self.why_done:
            if self._looks.is_open:
                self._read()
            if self._looks.is_due(self.step) and not self.why_done and (watched := self._watched_version()) is not None:
                self._looks.begin(self.step)  # on all ranks, whatever their sizes
                if watched.runs(inputs):
                    return watched
        return self._where_it_runs(self._now, inputs)

    def _where_it_runs(self, version: Version, inputs: Sequence[Any]) -> Version:
        """Return the version, or the first one where it does not run with inputs of these sizes."""
        if version.runs(inputs):
            return version
        if not self._is_partial:
            self._is_partial = True
            warn_user(
                f"fp8: the automatic mode changed a graph for sizes with {version.conditions} alone; others run as it "
                "was compiled first."
            )
        return self._first

    def _watched_version(self) -> Version | None:
        """Return the form of this version that measures; end the automatic mode where it cannot be compiled."""
        if self._watched is None:
            options = self._now.options
            mode = WITHOUT_CUDA_GRAPHS.get(options.mode or "", options.mode)
            with store.collected():
                self._watched = self._version(replace(options, watch=self._name, mode=mode, dump=None))
        return self._watched

    def _read(self) -> None:
        """Decide on what the last look measured, when all of it is there, on all ranks."""
        # a head in chunks is converted, and measures nothing
        measured = sum(1 for m in self.plan.converted if m.code != Reason.CHUNKED_LOSS)
        rows = self._looks.read(2 * measured)
        if rows is None:
            return
        if not rows:  # no rank had inputs of sizes that the measuring form runs with
            self._looks.become_due(self.step)
            return
        self.measured = _of_casts(rows, self.plan)
        if self._decide(rows):
            self._looks.begin_anew(self.step)
        else:
            self._looks.become_rarer()

    def _decide(self, rows: Sequence[Row]) -> bool:
        """Change what should be changed. Returns True if looks should begin anew: something kept too little."""
        left = self.settings.recompiles - self.recompiles  # the last one is kept for what loses too much
        plan, changes = self._policy.look(self.plan, rows, self.step, losses_alone=left <= 1)
        is_for_noise = all(change.is_for_noise for change in changes)
        decided = self._ranks.gathered("changes", (bool(changes), is_for_noise))
        if not any(changed for changed, _ in decided):
            self.plan.matmuls[:] = plan.matmuls  # with what was seen, in their reasons
            return False
        if left <= 0:
            self._end(f"{self.settings.recompiles} recompiles are used up, and {len(changes)} more casts lose too much")
            return False
        saved = {**self._saved, **dict(_changed_saved(plan))}
        options = replace(
            self._base, plan=Overrides(NAME, overrides.load(replace(plan, saved=[])).graphs, tuple(saved.items()))
        )
        version = self._version(options)
        if version is None:
            return False
        explain_again(version.plan, plan)
        self._replace(version)
        self._saved = saved
        self._versions += 1
        self.changes += changes
        for change in changes:
            logger.info("adaptive: %s", change)
        return not all(for_noise for _, for_noise in decided)

    def _end(self, why: str, warn: bool = True) -> None:
        self.why_done = why
        if warn:
            warn_user(f"fp8: the automatic mode leaves a graph as it is: {why}.")
        logger.info("adaptive: %s", why)

    # ---- spikes of the loss -------------------------------------------------------------------------------------

    def roll_back(self, why: str) -> None:
        """Run some steps in BF16, then go on in FP8 with a look: a loss was a spike."""
        in_bf16 = self.step < max(self._bf16_until, self.settings.bf16_steps)
        if not self.is_training or in_bf16 or not self._is_in_fp8():
            return
        self._bf16_until = self.step + self._bf16_steps
        self._looks.begin_anew(self._bf16_until)
        change = Change(self.step, "", "matmuls", FP8, f"{BF16} for {self._bf16_steps} steps", why)
        self._bf16_steps *= 2
        self.changes.append(change)
        logger.info("adaptive: %s", change)

    def _is_in_fp8(self) -> bool:
        """Return True if matmuls are in FP8 and BF16 can be had instead, also where no more changes are made."""
        return self._converts and not self._is_fixed

    def _bf16_version(self) -> Version | None:
        """Return the graph in BF16; end the automatic mode where it cannot be compiled."""
        if self._bf16 is None:
            with store.collected():
                self._bf16 = self._version(self._in_bf16())
        return self._bf16

    def _in_bf16(self) -> Options:
        return replace(self._base, recipe=Recipe("bf16", None, None, None), save=KEEP_ALL)

    # ---- versions -----------------------------------------------------------------------------------------------

    def _version(self, options: Options) -> Version | None:
        """Return the graph compiled with other options; end the automatic mode where one of the ranks cannot.

        They wait for each other in training alone: each may evaluate when it likes.
        """
        ranks = self._ranks if self.is_training else Agreement(ranks_of(None), self._name)
        version, why = None, ""
        try:
            compiled, made, conditions = self._captured.again(options)
            version = Version(options, made[-1] if made else Plan(), compiled, conditions)
        except CannotRecompileError as error:
            why = str(error)
        except Exception as error:
            why = failures.first_line(error)
            if options.strict:
                ranks.first_failure("version", why)
                raise
        if why := ranks.first_failure("version", why):
            self._is_fixed = True
            self._end(f"not compiled again: {why}")
            return None
        return version

    def _replace(self, version: Version) -> None:
        """Run this version from now on."""
        self.replaced.append(self._now.plan)
        self._now, self._watched = version, None
        self._see_casts()

    def _see_casts(self) -> None:
        if self.is_training:
            self._converts = self._ranks.any("casts that run", bool(self.plan.converted))

    def _start_fp8(self) -> None:
        version = self._version(self._base)
        if version is not None:
            self._replace(version)
            self._begin()

    def _begin(self) -> None:
        """Start from the version of the options themselves."""
        self._versions = 1
        self._policy.start_from(self.plan)
        self._see_casts()
        if self.is_training and not self._converts:
            self._end("nothing of it is in FP8", warn=False)

    def _following(self) -> Version:
        """Return the version of an inference graph: with the options of its training graph, where there is one."""
        leader = next((s for s in reversed(adaptive_graphs()) if s.is_training and s._leads(self)), None)
        options = leader._now.options if leader is not None else self._base
        if options != self._now.options and not self.why_done and (version := self._version(options)) is not None:
            self._replace(version)
        return self._now

    def _leads(self, other: AdaptiveGraph) -> bool:
        return self._parameters.are_of_one_model(other._parameters) and _outputs(self.plan) == _outputs(other.plan)


def adaptive_graphs() -> list[AdaptiveGraph]:
    """Return the graphs of this process in automatic mode, oldest first; `changes` says what each did, and why."""
    return [s for ref in _all if (s := ref()) is not None]


def observe_loss(loss: Tensor, of: AdaptiveGraph | None = None) -> None:
    """Take the loss of a step, []: after a spike all graphs in automatic mode run some steps in BF16.

    A graph that returns its loss, as a plain tensor, calls this by itself. Where the loss is computed outside, call it
    once a step. of: the graph whose losses it is compared with; left out, the first one's.
    """
    graphs = [graph for graph in adaptive_graphs() if graph.is_training]
    judge = of or next((graph for graph in graphs if graph.settings.spike), None)
    if judge is None:
        return
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if why := judge._losses.add(mean(whole, judge._ranks.ranks)):
        for graph in graphs:
            graph.roll_back(why)


def _alone_on_the_wire(options: Options, settings: Adaptive) -> Options:
    """Return options with which nothing is cast before it travels to ranks that may cast otherwise by then."""
    if settings.ranks is not None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return options
    if options.wire == "fp8":
        warn_user(
            "fp8: wire='fp8' is not carried out in automatic mode where each rank decides alone: a rank may expect FP8 "
            "where another sends BF16. options={'adaptive': {'ranks': 'world'}, …} has all decide together."
        )
    return replace(options, wire="bf16")


def _has_groups(inputs: Sequence[Any]) -> bool:
    kinds = {x.device for x in inputs if isinstance(x, torch.Tensor)}
    device = devices.describe(next((d for d in kinds if d.type != "cpu"), torch.device("cpu")))
    return device.emulated or device.blockwise


def _of_casts(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """Return the rows of casts that run, without those of matmuls in BF16, which a look measures as well."""
    in_fp8 = {key for row, key, _ in keyed(plan.matmuls) if row.decision == FP8}
    return [row for row in rows if row.role == "saved" or (row.path, row.role, row.occurrence) in in_fp8]


def _changed_saved(plan: Plan) -> list[tuple[SavedKey, str]]:
    """Return keys and forms of the saved tensors that a look changed."""
    seen: dict[SavedKey, int] = {}
    found = []
    for row in plan.saved:
        first = saved_key(row.path, row.source, row.dtype, row.shape, 0)
        occurrence = seen[first] = seen.get(first, -1) + 1
        if row.code == Reason.ADAPTIVE:
            found.append(((*first[:4], occurrence), row.form))
    return found


def _outputs(plan: Plan) -> set[Any]:
    return {member for row, _, members in keyed(plan.matmuls) if row.role == "output" for member in members}
