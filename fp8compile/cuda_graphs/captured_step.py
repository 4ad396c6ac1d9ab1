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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8compile.adaptive.adaptive_graph import adaptive_graphs
from fp8compile.cuda_graphs.owners import Owners, Snapshot, is_number_like
from fp8compile.cuda_graphs.recording import Recorder, Recording, Step
from fp8compile.errors import CaptureError, OptionError
from fp8compile.torch_hooks.calls.user_frame import warn_user

P = ParamSpec("P")
R = TypeVar("R")
WARMUP = 3
MOST_GRAPHS = 32
MOST_LOST = 8  # recordings that had to be thrown away, before a warning says so
CHANGES = {  # fields of a `Snapshot`, and what changes them
    "modes": "train() or eval() of a model",
    "tensors": "a parameter or a buffer becomes another tensor; write into it",
    "states": "a state becomes another tensor, or is a count in Python: capturable=True, where there is one",
    "settings": "of an optimizer's group, or of a scaler",
}
INSIDE = "What a step needs from the host has to happen outside of it (logging, `.item()`, schedulers, loading data)."


def capture_step(
    step: Callable[P, R],
    *owners: torch.nn.Module | Optimizer | GradScaler,
    warmup: int = WARMUP,
    most_graphs: int = MOST_GRAPHS,
) -> Callable[P, R]:
    """Return `step` so that, after `warmup` calls, each call replays it as one CUDA graph.

    owners: the model, the optimizers, the GradScaler: all whose tensors the step changes. Before each replay it is seen
    whether their tensors lie where they lay and their settings are as they were; if not (a checkpoint was loaded,
    `model.eval()`), the step is recorded again. Rates (`lr`) become tensors, so schedulers work, outside of the step.

    The step takes tensors, in nested containers, and numbers, text or None, whose values are part of the graph; for
    each shape and value there is a graph, at most `most_graphs`; calls beyond run as they are. It returns copies.
    Gradients that are None before the step have to be None after it: `zero_grad()` belongs into the step.

    Raises `CaptureError`, at the call that records, if the step does what a graph cannot hold; parameters and states
    are then as the call before left them. On a CPU every call runs the step as it is.
    """
    if warmup < 1:
        raise OptionError(f"warmup={warmup}: the first call compiles, so at least one has to run before a capture")
    captured = CapturedStep(step, Owners(owners), warmup, most_graphs)

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return captured(*args, **kwargs)

    cast(Any, call).captured = captured
    return call


class CapturedStep:
    """A step, and its recording for each form of its inputs. recordings: by form; lost: how many were thrown away."""

    def __init__(self, step: Step, owners: Owners, warmup: int, most_graphs: int) -> None:
        self.step, self.owners, self.warmup, self.most_graphs = step, owners, warmup, most_graphs
        self.recorder: Recorder | None = None
        self.recordings: dict[Any, Recording] = {}
        self.calls: dict[Any, int] = {}  # of each form, since recordings were thrown away
        self.seen = Snapshot()
        self.last: Recording | None = None  # whose gradients the parameters have
        self.lost = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train one step: as it is, or by a replay."""
        if self.recorder is None and not self._can_record():
            return self.step(*args, **kwargs)
        assert self.recorder is not None
        self.owners.hold_rates()
        if self.recordings and self.owners.snapshot().differs_in(self.seen):
            self._forget()
        form = _form(args, kwargs)
        recording = self.recordings.get(form)
        if recording is None:
            count = self.calls[form] = self.calls.get(form, 0) + 1
            is_one_too_many = count > self.warmup and len(self.recordings) >= self.most_graphs
            if is_one_too_many and count == self.warmup + 1:
                warn_user(
                    f"fp8: a captured step has {self.most_graphs} graphs, as many as it may (most_graphs): inputs of "
                    "other shapes or values run as they are. Pad them to fewer lengths"
                )
            if count <= self.warmup or is_one_too_many:
                return self._run(self.recorder, args, kwargs)
            recording = self._record(self.recorder, form, args, kwargs)
        if recording is not self.last:
            self._hand_over_gradients(recording)
        return recording.replay(args, kwargs)

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

    def _run(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as it is; gradients that it leaves elsewhere are no reason to record again what ran before."""
        results = recorder.run(self.step, args, kwargs)
        now = self.owners.snapshot()
        if self.recordings and replace(now, gradients=self.seen.gradients).differs_in(self.seen):
            self._forget()
        self.last, self.seen = None, now
        return results

    def _hand_over_gradients(self, recording: Recording) -> None:
        """Give parameters the gradients that this recording writes."""
        for p, gradient in recording.gradients:
            p.grad = gradient
        self.last, self.seen = recording, self.owners.snapshot()

    def _record(self, recorder: Recorder, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Record the step for inputs of this form; gradients are as before if it cannot be recorded."""
        if adaptive_graphs():
            raise CaptureError("option `adaptive` decides on the host, between steps, what a step computes in FP8")
        gradients, versions, before = self.owners.gradients(), self.owners.versions_of_rates(), self.owners.snapshot()
        try:
            recording = recorder.record(self.step, args, kwargs)
            self._check(before, versions, recording.results)
        except CaptureError as error:
            for p, gradient in gradients:
                p.grad = gradient
            error.add_note(INSIDE)
            raise
        recording.gradients = self.owners.gradients()
        self.last, self.seen = recording, self.owners.snapshot()
        self.recordings[form] = recording
        return recording

    def _check(self, before: Snapshot, versions: list[int], results: Any) -> None:
        """Raise `CaptureError` if a replay would not do what another call of the step would."""
        if self.owners.versions_of_rates() != versions:
            raise CaptureError(
                "the step writes a learning rate, and a replay would write the same one: step schedulers outside of it"
            )
        after = self.owners.snapshot()
        for was, now in zip(before.gradients, after.gradients, strict=True):
            if (was is None) != (now is None):
                raise CaptureError(
                    "a gradient is None before the step and not after it, or after it and not before, so that a replay "
                    "would not add to it: put zero_grad() into the step"
                )
        changed = replace(after, gradients=before.gradients).differs_in(before)
        if changed:
            raise CaptureError(f"the step changes {changed} on the host, which a replay would not: {CHANGES[changed]}")
        for x in pytree.tree_leaves(results):
            if not isinstance(x, Tensor) and not is_number_like(x):
                raise CaptureError(f"the step returns a {type(x).__name__}, of which a replay can make no copy")

    def _forget(self) -> None:
        """Throw all recordings away: something that they rely on has changed."""
        self.recordings.clear()
        self.calls.clear()
        self.last = None
        if self.recorder is not None:
            self.recorder.begin_anew()
        self.lost += 1
        if self.lost == MOST_LOST:
            warn_user(
                f"fp8: a captured step has been recorded {MOST_LOST} times: tensors or settings of its model or "
                "optimizer change between its calls (only rates may; gradients, states and other settings may not)"
            )


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
    return spec, tuple(found)
