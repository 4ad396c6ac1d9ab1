"""The step of an optimizer whose parameters are updated alike: one rule traced for each kind, launched for all.

    opt.step()  →  hooks  →  torch's step  →  for each group: opt._init_group(group, lists)  →  the launch; empty lists

While such a step runs Dynamo is off: torch's own step runs as Python, with its hooks, its closure, its groups. Where it
asks for the tensors of a group (`_init_group`), they have been updated already and it gets none, so that its own
arithmetic has nothing to do. A step that cannot be taken so is compiled as a whole, by Dynamo.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock  # torch compiles on one thread at a time
from torch.optim import Optimizer

from fp8compile.errors import StateError
from fp8compile.kernels.optimizer import compile_ahead
from fp8compile.optimizer import fused
from fp8compile.optimizer.parameter_groups import group_rows
from fp8compile.optimizer.prepare import ensure_states, prepare_optimizer
from fp8compile.optimizer.shared_step import stand_ins
from fp8compile.optimizer.shared_step.alike import Alike
from fp8compile.optimizer.shared_step.group_step import GroupStep, by_kind, form_of
from fp8compile.optimizer.shared_step.kinds import Kind, kind_of, refusal_of
from fp8compile.optimizer.shared_step.known_states import KnownStates
from fp8compile.optimizer.shared_step.roles import NotAlikeError, SparseGradientError, StatesToComeError
from fp8compile.optimizer.shared_step.template import Template, template_of
from fp8compile.optimizer.shared_step.tracing import UNSCALED_BY, trace
from fp8compile.optimizer.state_conversion import (
    is_prepared,
    parameters_of,
    recipe_of,
    record_of,
    state_rows,
)
from fp8compile.optimizer.step_graph import is_captured
from fp8compile.optimizer.unscaling import unscaled_by
from fp8compile.options import Options
from fp8compile.plan import store
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Lowered, MergedUpdate
from fp8compile.torch_hooks.calls.user_frame import calling_line, warn_user

_templates: dict[tuple[Kind, str], list[Template]] = {}
_shared: weakref.WeakKeyDictionary[Optimizer, SharedStep] = weakref.WeakKeyDictionary()


class SharedStep:
    """Steps one optimizer by one rule for each kind. refusal: why its step is compiled as a whole; "" if it is not."""

    def __init__(self, opt: Optimizer, options: Options) -> None:
        self.options, self.refusal = options, refusal_of(opt) or _refusal_of(options)
        self.groups: dict[int, GroupStep] = {}
        self.seen: dict[str, set[Any]] = {}  # values that settings have had
        self.is_torchs = False  # for one step: states are still to come
        self.known = KnownStates()
        self.has_sparse = False  # steps are torch's, uncompiled
        self.reported: Any = None  # states and updates of the last plan

    def prepare(self, opt: Optimizer, has_gradients: bool) -> bool:
        """Make all that a step needs; return True if the step can be taken.

        Nothing but states is changed. What this step cannot be is remembered, with the reason. has_gradients: False
        where those are still to come, from a closure; then `take` does the rest.
        """
        self.is_torchs = False
        self.known.begin_step()
        if self.groups:
            return True
        try:
            if not is_prepared(opt):
                prepare_optimizer(opt, self.options.states)
            _make_capturable(opt)
            if has_gradients:
                self._bind_all(opt)
        except StatesToComeError:
            self.groups.clear()
            self.is_torchs = True
        except NotAlikeError as reason:
            self.refusal = str(reason)
        except Exception as error:
            if self.options.strict:
                raise
            self.refusal = _untraced(error)
        return not self.refusal

    def _bind_all(self, opt: Optimizer) -> None:
        self._bind(opt, range(len(opt.param_groups)))
        self._report(opt)

    def _bind(self, opt: Optimizer, indices: Iterable[int]) -> None:
        """Sort the parameters of groups by kind, and find the template of each; no thread compiles any more then.

        All rules are traced first: threads compile their kernels while the functions of numbers are compiled.
        """
        with compile_lock:
            try:
                for index, group in [(index, self._sorted(opt, index)) for index in indices]:
                    group.prepare(opt.param_groups[index], self.options)
                    self.groups[index] = group
            finally:
                compile_ahead.wait_for_all()

    def _sorted(self, opt: Optimizer, index: int) -> GroupStep:
        """Return a group sorted by kind, still to be prepared."""
        group = opt.param_groups[index]
        is_told_by_others = any(p.dim() == 0 for p in group["params"])  # what its states are (`kinds.numbers_of`)
        for each in opt.param_groups if is_told_by_others else [group]:
            ensure_states(opt, each)
        _move_counts(opt)
        unscaling = unscaled_by(opt)
        numbers = unscaling.numbers if unscaling is not None else None
        here = [p for p in group["params"] if p.grad is not None]
        _compile_reading(here)
        moving = self._moving(opt, group)
        kinds = by_kind(here, lambda p: kind_of(opt, group, p, moving, numbers is not None))
        shared: dict[str, Tensor] = dict(zip(UNSCALED_BY, numbers or (), strict=False))
        alike = []
        for kind, parameters in kinds.items():
            template = _template(opt, group, kind, parameters[0], self.options, numbers)
            alike.append(Alike(kind, template, parameters, [opt.state[p] for p in parameters]))
        others = [p for p in group["params"] if p.grad is None]
        free = {name for kind in kinds for name in kind.moving}
        free |= {name for name in opt.defaults if isinstance(group.get(name), Tensor)}  # read anew in each step
        settings = {name: group[name] for name in opt.defaults if name in group and name not in free}
        forms = {name: form_of(group[name]) for name in free}
        return GroupStep(list(group["params"]), settings, forms, alike, shared, others)

    def _moving(self, opt: Optimizer, group: Mapping[str, Any]) -> set[str]:
        """Return the names of the settings that have been seen with several values, as schedules of betas have."""
        for name in opt.defaults:
            value = group.get(name)
            if type(value) is float or (isinstance(value, tuple) and all(type(x) is float for x in value)):
                self.seen.setdefault(name, set()).add(value)
        return {name for name, values in self.seen.items() if len(values) > len(opt.param_groups)}

    def take(self, opt: Optimizer, group: Mapping[str, Any]) -> bool:
        """Update the parameters of `group`; return False where torch's step has to."""
        if self.is_torchs:
            return False
        index = next((i for i, g in enumerate(opt.param_groups) if g is group), None)
        if index is None:
            return False
        bound, states = self.groups.get(index), self.known.differing(opt.state)
        if bound is None or not bound.is_current(states, group):
            try:
                self._bind(opt, [index])
            except StatesToComeError:
                self.is_torchs = True
                return False
            except Exception as reason:
                if self.options.strict and not isinstance(reason, NotAlikeError):
                    raise
                self._give_up(opt, reason)
                return False
            self._report(opt)
            bound = self.groups[index]
            if not bound.is_current(opt.state, group):
                raise StateError(f"the states of {type(opt).__name__} change while its step looks at them")
        self.known.found(opt.state, index, len(opt.param_groups))
        bound.step(group)
        return True

    def _give_up(self, opt: Optimizer, reason: Exception) -> None:
        """Leave the step that runs to torch, and later ones to a compilation as a whole."""
        self.refusal = record_of(opt).whole = str(reason) if isinstance(reason, NotAlikeError) else _untraced(reason)
        self.has_sparse = isinstance(reason, SparseGradientError)  # Dynamo may raise of such a step
        later = "too" if self.has_sparse else "as a whole"
        warn_user(f"fp8: this step of {type(opt).__name__} runs uncompiled, later ones {later}: {self.refusal}")
        self.is_torchs = True

    def _report(self, opt: Optimizer) -> None:
        """Keep a plan of what is updated together, unless the last one says the same."""
        found: dict[str, MergedUpdate] = {}
        for x in (x for group in self.groups.values() for x in group.alike):
            elements = sum(p.numel() for p in x.parameters)
            row = found.get(x.template.spec)
            found[x.template.spec] = MergedUpdate(
                len(x.parameters) + (row.parameters if row else 0),
                elements + (row.elements if row else 0),
                x.template.formats,
                len(x.template.update.values),
            )
        states = state_rows(opt)
        if (states, found) == self.reported:  # memory may lie elsewhere in every step
            return
        self.reported = states, found
        plan = Plan("optimizer", states=states, groups=group_rows(opt, states))
        plan.halves = {"inference": Lowered(updates=list(found.values()))}
        plan.called = calling_line()
        store.compiled([plan], None)


def shared_step(opt: Optimizer, options: Options) -> SharedStep:
    """Return what is known of the steps of `opt`."""
    if opt not in _shared or _shared[opt].options != options:
        _shared[opt] = SharedStep(opt, options)
    return _shared[opt]


def _untraced(error: Exception) -> str:
    return f"its step could not be traced by itself ({type(error).__name__}: {error})".splitlines()[0]


def _refusal_of(options: Options) -> str:
    """Return the reason why these options want one graph of all parameters; "" if they do not."""
    if options.dump:
        return "the graph that option dump shows is that of all parameters"
    if is_captured(options):
        return "a CUDA graph is made of the step"
    if passes := [name for name, _ in options.inductor if name.endswith("_pass")]:
        return f"{passes[0]} wants to see the graph of all parameters"
    return ""


def take_step(opt: Optimizer, options: Options, has_closure: bool, as_whole: bool = False) -> Callable[[], None] | None:
    """Let the step of `opt` that begins now take what `_init_group` hands out; return what ends it.

    None where the step is to be compiled as a whole, as with `as_whole`. With a closure gradients are still to come.
    """
    recipe = recipe_of(opt) if is_prepared(opt) else options.states
    if fused.can_be_taken_over(opt, recipe):
        if fused.is_being_unscaled(opt):  # this step is torch's
            return lambda: fused.take_over(opt)
        fused.take_over(opt)
    if as_whole or (not is_prepared(opt) and _has_sparse_gradients(opt)):  # nobody compiles such a step
        return None
    mine, record, warned = shared_step(opt, options), record_of(opt), "_warned_capturable_if_run_uncaptured"
    if mine.has_sparse:
        return lambda: None
    if mine.refusal and not is_prepared(opt) and not refusal_of(opt):
        prepare_optimizer(opt, options.states)  # or Dynamo would see plain states of all parameters first
    if mine.refusal or not mine.prepare(opt, not has_closure):
        record.whole = mine.refusal
        return None
    record.take = mine.take
    setattr(opt, warned, True)  # torch warns of steps that could be in a CUDA graph and are not: this is its launch

    def end() -> None:
        record.take = None

    return end


def _has_sparse_gradients(opt: Optimizer) -> bool:
    return any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters_of(opt))


def _make_capturable(opt: Optimizer) -> None:
    """Have step counts on the GPU, as Dynamo has before it traces a first step."""
    for group in opt.param_groups:
        if "capturable" in group and all(p.is_cuda and not opt.state.get(p) for p in group["params"]):
            group["capturable"] = True


def _compile_reading(parameters: list[Tensor]) -> None:
    """Begin to compile what reads step counts, on the device of the first parameter."""
    if parameters and parameters[0].is_cuda:
        from fp8compile.kernels.optimizer.scattered_numbers import compile_reading  # imports Triton

        compile_reading(parameters[0].device)


def _move_counts(opt: Optimizer) -> None:
    """Move step counts to where the parameters are, as Dynamo does before it traces a step."""
    for p, state in opt.state.items():
        count = state.get("step")
        if isinstance(count, Tensor) and count.is_cpu and not p.is_cpu:
            state["step"] = count.to(p.device)


def _template(
    opt: Optimizer,
    group: Mapping[str, Any],
    kind: Kind,
    parameter: Tensor,
    options: Options,
    numbers: tuple[Tensor, Tensor] | None,
) -> Template:
    """Return the rule of a kind: one that is known, or is found now on stand-ins."""
    known = _templates.setdefault((kind, repr((options.executor, options.inductor))), [])
    for template in known:
        if all(group[name] == value for (name, _), value in template.constants.items()):
            return template
    written = {name: float(group[name]) for name in kind.moving if type(group[name]) is int}
    trial = stand_ins.stand_in(opt, {**group, **written}, parameter)
    traced = trace(trial, options, kind.moving, numbers)
    read = {role.name for role in traced.roles}
    constants = {(name, ""): group[name] for name in kind.moving if name not in read}
    known.append(template_of(traced, options, constants))
    return known[-1]
