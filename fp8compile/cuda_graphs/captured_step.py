"""A whole training step in one CUDA graph: forward, backward, clipping and the optimizer's step by one launch.

    def step(batch):
        loss = run(**batch).loss                              # run = torch.compile(model, backend="fp8")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()                                            # opt.step = torch.compile(opt.step, backend="fp8")
        opt.zero_grad()
        return loss

    step = fp8compile.capture_step(step, model, opt)

The first calls run the step as it is, and compile; then one records it, and replays what it has recorded, as all later
calls do. Every call trains one step. Inputs of other shapes are recorded by themselves, after calls of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8compile.adaptive.adaptive_graph import adaptive_graphs
from fp8compile.cuda_graphs.owners import Owners, Snapshot, is_number_like
from fp8compile.cuda_graphs.recording import ANY, Recorder, Recording, Step
from fp8compile.errors import CaptureError, OptionError
from fp8compile.torch_hooks.calls.user_frame import warn_user
from fp8compile.torch_hooks.local_parts import local_part

P = ParamSpec("P")
R = TypeVar("R")
WARMUP = 3
MOST_GRAPHS = 32
MOST_LOST = 8  # times that recordings had to be thrown away, before the step is given up
FORMS_A_GRAPH = 4  # so many times the most graphs: inputs of so many forms are never alike
CHANGES = {  # fields of a `Snapshot`, and what changes them
    "modes": "train() or eval() of a model, or a number that a module keeps",
    "tensors": "a parameter, a buffer or a module's tensor becomes another one; write into it",
    "trained": "requires_grad of a parameter",
    "states": "a state becomes another tensor, or is a count in Python: capturable=True, where there is one",
    "settings": "of an optimizer's group other than its rate (OneCycleLR: cycle_momentum=False), or of a scaler",
    "gradients": "they lie elsewhere than when it was recorded, or are no longer None",
}
INSIDE = "What a step needs from the host has to happen outside of it (logging, `.item()`, schedulers, loading data)."


def capture_step(
    step: Callable[P, R],
    *owners: torch.nn.Module | Optimizer | GradScaler,
    warmup: int = WARMUP,
    most_graphs: int = MOST_GRAPHS,
) -> Callable[P, R]:
    """Return `step` so that, after `warmup` calls, each call replays it as one CUDA graph.

    owners: every model that gradients reach, every optimizer, the GradScaler: all whose tensors the step changes.
    Before each replay it is seen whether their tensors lie where they lay and their settings are as they were; if not
    (a checkpoint was loaded, `model.eval()`), the step runs as it is, and is recorded again. Rates (`lr`) become
    tensors, so schedulers of rates work, outside of the step.

    The step takes tensors, in nested containers, and numbers, text or None, whose values are part of the graph; for
    each shape and value there is a graph, at most `most_graphs`; calls beyond run as they are. It is given copies of
    the tensors, on the GPU, and its results are copies. Gradients that are None before the step have to be None after
    it: `zero_grad()` belongs into the step. A model that is first compiled here is compiled for a CUDA graph (option
    `captured`): the time that its host takes does not count.

    Raises `CaptureError`, at the call that records, if the step does what a graph cannot hold; parameters and states
    are then as the call before left them. On a CPU every call runs the step as it is.
    """
    if not callable(step):
        raise OptionError(
            f"capture_step captures a function, and {step!r} is none: capture_step(step, model, optimizer)"
        )
    if warmup < 1:
        raise OptionError(f"warmup={warmup}: the first call compiles, so at least one has to run before a capture")
    if most_graphs < 1:
        raise OptionError(f"most_graphs={most_graphs}: each form of inputs has a graph, so none would ever be captured")
    captured = CapturedStep(step, Owners(owners), warmup, most_graphs)

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return captured(*args, **kwargs)

    cast(Any, call).captured = captured
    return call


class CapturedStep:
    """A step, and its recording for each form of its inputs.

    calls: how often each form has run as it is, since recordings were thrown away; lost: how often that happened;
    is_given_up: the step runs as it is from now on.
    """

    def __init__(self, step: Step, owners: Owners, warmup: int, most_graphs: int) -> None:
        self.step, self.owners, self.warmup, self.most_graphs = step, owners, warmup, most_graphs
        self.recorder: Recorder | None = None
        self.recordings: dict[Any, Recording] = {}
        self.calls: dict[Any, int] = {}
        self.seen = Snapshot()
        self.lost = 0
        self.is_given_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train one step: as it is, or by a replay."""
        if self.recorder is None and not self._can_record():
            return self.step(*args, **kwargs)
        assert self.recorder is not None
        self.owners.hold_rates()
        form = _form(args, kwargs)
        recording = self._recording(form)
        if recording is None:
            if not self._is_due(form):
                return self._run(self.recorder, form, args, kwargs)
            recording = self._record(self.recorder, form, args, kwargs)
        for p, gradient in recording.after:
            if p.grad is not gradient:
                p.grad = gradient
        results = recording.replay(args, kwargs)
        increment_version(recording.written)  # autograd refuses a backward through what has been overwritten
        return results

    def _can_record(self) -> bool:
        """Make a recorder, where there is one GPU to record; False on a CPU."""
        devices = self.owners.devices()
        if not any(d.type == "cuda" for d in devices):
            return False
        if len(devices) > 1:
            raise CaptureError(f"the step's parameters are on {len(devices)} devices, and a CUDA graph is of one")
        if is_distributed():
            raise CaptureError("the step is one of several ranks: what they exchange is arranged by their hosts")
        self.recorder = Recorder.on(devices.pop())
        return True

    def _recording(self, form: Any) -> Recording | None:
        """Return the recording of a form, if all that it relies on is as it was; else throw away what is not."""
        changed = self.owners.snapshot().differs_in(self.seen) if self.recordings else ""
        if changed:
            self._forget(changed)
        recording = self.recordings.get(form)
        if recording is None:
            return None
        now = (_place((p, p.grad)) for p, _ in recording.after)
        if all(was in (ANY, place) for was, place in zip(recording.before, now, strict=True)):
            return recording
        del self.recordings[form], self.calls[form]
        self._lose("gradients")
        return None

    def _is_due(self, form: Any) -> bool:
        """Return True if a call is to be recorded; warns where inputs have too many forms."""
        if self.is_given_up or self.calls.get(form, 0) < self.warmup:
            return False
        if len(self.recordings) < self.most_graphs:
            return True
        if self.calls[form] == self.warmup:
            warn_user(
                f"fp8: a captured step has {self.most_graphs} graphs, as many as it may (most_graphs): inputs of other "
                "shapes or values run as they are. Pad them to fewer lengths"
            )
        return False

    def _run(self, recorder: Recorder, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as it is."""
        results = recorder.run(self.step, args, kwargs)
        changed = self.owners.snapshot().differs_in(self.seen) if self.recordings else ""
        if changed:
            self._forget(changed)
        if not self.is_given_up:
            self.calls[form] = self.calls.get(form, 0) + 1
            if len(self.calls) > FORMS_A_GRAPH * self.most_graphs:
                self._give_up(
                    f"its inputs have had {len(self.calls)} forms: give it numbers that change as tensors, and pad to "
                    "fewer lengths"
                )
        return results

    def _record(self, recorder: Recorder, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Record the step for inputs of this form; what it has exchanged is put back if it cannot be recorded."""
        if adaptive_graphs():
            raise CaptureError("option `adaptive` decides on the host, between steps, what a step computes in FP8")
        put_back, before = self.owners.keep(), Before.of(self.owners)
        versions = [(p, p._version) for p in self.owners.parameters()]
        try:
            with self.owners.seeing_zero_grad() as emptied:
                recording = recorder.record(self.step, args, kwargs)
            before.compare(self.owners, recording.results)
            recording.before = before.needs(self.owners, emptied)
        except BaseException as error:
            put_back()
            if isinstance(error, CaptureError):
                error.add_note(INSIDE)
            raise
        recording.after = self.owners.gradients()
        recording.written = [p for p, version in versions if p._version != version]
        self.seen = self.owners.snapshot()
        self.recordings[form] = recording
        return recording

    def _forget(self, changed: str) -> None:
        """Throw all recordings away: `changed`, a field of a snapshot, is not as they rely on."""
        self.recordings.clear()
        self.calls.clear()
        if self.recorder is not None:
            self.recorder.begin_anew()
        self._lose(changed)

    def _lose(self, changed: str) -> None:
        self.lost += 1
        if self.lost == MOST_LOST:
            self._give_up(
                f"it was recorded {MOST_LOST} times, as {changed} changed between its calls: {CHANGES[changed]}"
            )

    def _give_up(self, why: str) -> None:
        """Run the step as it is from now on, and say why."""
        self.recordings.clear()
        self.calls.clear()
        self.is_given_up = True
        warn_user(f"fp8: a captured step runs as it is from now on: {why}")


@dataclass
class Before:
    """Hold what was there before a step was recorded."""

    seen: Snapshot
    gradients: list[int | None]
    rates: list[int]
    others: list[int]

    @classmethod
    def of(cls, owners: Owners) -> Before:
        """Return what is there now."""
        gradients = list(map(_place, owners.gradients()))
        return cls(owners.snapshot(), gradients, owners.versions_of_rates(), owners.versions_of_others())

    def compare(self, owners: Owners, results: Any) -> None:
        """Raise `CaptureError` if a replay would not do what another call of the step would."""
        if owners.versions_of_rates() != self.rates:
            raise CaptureError(
                "the step writes a learning rate, and a replay would write the same one: step schedulers outside of it"
            )
        if owners.versions_of_others() != self.others:
            raise CaptureError("the step writes a parameter of which capture_step was not given the optimizer")
        changed = owners.snapshot().differs_in(self.seen)
        if changed:
            raise CaptureError(f"the step changes {changed} on the host, which a replay would not: {CHANGES[changed]}")
        for x in pytree.tree_leaves(results):
            if not isinstance(x, Tensor) and not is_number_like(x):
                raise CaptureError(f"the step returns a {type(x).__name__}, of which a replay can make no copy")

    def needs(self, owners: Owners, emptied: Set[int]) -> list[int | None]:
        """Return where each gradient has to lie before a replay. emptied: ids of parameters, by `zero_grad`."""
        found: list[int | None] = []
        for (p, gradient), was in zip(owners.gradients(), self.gradients, strict=True):
            now = _place((p, gradient))
            if now != was and not (id(p) in emptied and now is not None):
                raise CaptureError(
                    "the step leaves another gradient than it found, so that a replay would not add to it: put "
                    "zero_grad() of the model or the optimizer into the step"
                )
            found.append(was if now == was else ANY)
        return found


def _place(of_parameter: tuple[Tensor, Tensor | None]) -> int | None:
    """Return where the gradient of a parameter lies; None if it has none."""
    gradient = of_parameter[1]
    return None if gradient is None else local_part(gradient).data_ptr()


def is_distributed() -> bool:
    """Return True for one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what distinguishes inputs that need graphs of their own; raises `OptionError` for what none can take."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    found: list[Any] = []
    for x in leaves:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, torch.nn.Parameter) or x.requires_grad:
                what = "one whose gradient is asked for" if x.requires_grad else f"a {type(x).__name__}"
                raise OptionError(f"a captured step takes plain tensors, not {what}")
            found.append((x.shape, x.dtype, x.device))
        elif is_number_like(x):
            found.append((type(x), x))
        else:
            raise OptionError(f"a captured step takes tensors, numbers and text, not a {type(x).__name__}")
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    return spec, tuple(found), modes
