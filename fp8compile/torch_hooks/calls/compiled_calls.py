"""Calls of compiled functions: whether one reached a graph of this backend, and what is said where none did.

torch may leave a function before any backend is asked (an nn.LSTM, an optimizer with fused=True): then nothing is
compiled, and torch says nothing. torch enters a backend's `backend_ctx_ctor` around each call of what was compiled with
it, so here is one: it compares what ran, and what Dynamo gave up, before and after a call. Graphs of this backend count
their runs, so a graph that Dynamo had in its cache counts as well. Where no graph of this
backend ran and Dynamo had reasons, one warning names them (`fp8compile/torch_hooks/calls/uncompiled_calls.py`), and
`last_compile()` tells of this call.

Private API of torch, imported here only: torch's wrapper of a backend with its options, which hands on a backend's
`reset` and not its `backend_ctx_ctor`; Dynamo's counters; and the frame in which a compiled function is called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch._dynamo import config as dynamo_config  # lets the steps of optimizers read numbers from tensors
from torch._dynamo import (
    eval_frame,  # which function is called, whether by choice eagerly; whom reset() tells
    trace_rules,  # which code Dynamo does not take up by itself
)
from torch._dynamo.utils import counters  # what Dynamo gave up, and why
from torch.optim import Optimizer

from fp8compile import process_state
from fp8compile.plan import store
from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks.calls import steps_as_python, uncompiled_calls
from fp8compile.torch_hooks.calls.graph_runs import OPTIMIZER, Runs, around, runs
from fp8compile.torch_hooks.calls.user_frame import warn_user

# is given an optimizer whose step begins, what torch.compile was given beside the backend, and whether the step has a
# closure, and whether Dynamo has to see it; returns what ends a step that Dynamo does not see, None for any other
TakeStep = Callable[[Optimizer, Mapping[str, Any], bool, bool], Callable[[], None] | None]


_steps: list[Calls] = []  # of optimizers, that are running
_given_up: dict[CodeType, Sequence[str]] = {}  # code that Dynamo takes up no more, and why


def asked(backend: Callable[..., Any]) -> None:
    """Note that the backend is asked for a graph, and let `torch.compiler.reset()` reach it, also after a reset."""
    runs.asked += 1
    eval_frame.cached_backends.setdefault(id(backend), backend)


def step_is_warned_of() -> bool:
    """Return True if a step is running of which a warning has said that nothing of it is compiled."""
    return any(calls.is_warned for calls in _steps)


def reset() -> None:
    """Forget all plans, and what Dynamo gave up; torch calls it by the backend's `reset` in its own."""
    process_state.reset_with_torch()


def watch(backend: Callable[..., Any], take_step: TakeStep = lambda opt, given, has_closure, as_whole: None) -> None:
    """Have torch enter calls of what it compiles with `backend` from now on. take_step: see `TakeStep`."""
    backend.reset = reset  # type: ignore[attr-defined]
    backend.take_step = take_step  # type: ignore[attr-defined]


def hand_on_contexts() -> None:
    """Let torch's wrapper of a backend that is watched hand on a context for its calls."""
    wrapper = getattr(torch, "_TorchCompileWrapper", None)
    if wrapper is not None:
        wrapper.compiler_fn = _CompilerFunction()


class _CompilerFunction:
    """The attribute `compiler_fn` of torch's wrapper of a backend, which gives it a `backend_ctx_ctor` for ours.

    It is an attribute of the class, since the wrapper that looks the backend up for the first time exists already when
    this module is imported.
    """

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None or "compiler_fn" not in vars(wrapper):
            raise AttributeError("compiler_fn")
        return vars(wrapper)["compiler_fn"]

    def __set__(self, wrapper: Any, backend: Any) -> None:
        vars(wrapper)["compiler_fn"] = backend
        if getattr(backend, "reset", None) is reset:
            vars(wrapper)["backend_ctx_ctor"] = Calls(backend.take_step, wrapper)


@dataclass
class Calls:
    """Contexts for the calls of what one torch.compile made.

    Once a call has shown whether it reaches a graph, the next ones are let through. wrapper: torch's, of the backend,
    which knows the options.
    """

    take_step: TakeStep
    wrapper: Any = field(repr=False)
    is_known: bool = False
    is_optimizer: bool = False
    is_warned: bool = False  # that it reached none

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of one call."""
        return contextlib.nullcontext() if self.is_known and not self.is_optimizer else Call(self)


@dataclass
class Call:
    """One call of a compiled function."""

    calls: Calls
    function: Any = None
    optimizer: Optimizer | None = None
    before: Runs = field(default_factory=Runs)
    reasons: dict[str, int] = field(default_factory=dict)
    frames: int = 0
    error: BaseException | None = None
    undo: Callable[[], Any] | None = None
    taken: Callable[[], None] | None = None
    listened: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> Call:
        self.function, self.optimizer, names = _called()
        self.calls.is_optimizer = self.optimizer is not None
        if self.optimizer is not None:
            self.listened = around(OPTIMIZER)
            self.listened.__enter__()
        if self.optimizer is not None and self._is_taken(self.optimizer, names):
            self.calls.is_known = True
            return self
        if self.optimizer is not None:  # a step that reads a number from a tensor is one graph all the same
            self.undo = reading_numbers()
            _steps.append(self.calls)
        if not self.calls.is_known:
            eval_frame.cached_backends.setdefault(id(reset), _Reset)  # type: ignore[arg-type]
            self.before = Runs(**vars(runs))
            self.reasons, self.frames = _reasons(), counters["frames"]["total"]
            self.error = sys.exc_info()[1]
        return self

    def _is_taken(self, opt: Optimizer, names: Mapping[str, Any]) -> bool:
        """Return True if Dynamo does not have to see this step."""
        given = [x for x in (*names["args"], *names["kwargs"].values()) if x is not None and x is not opt]
        if not _is_on() or not steps_as_python.is_possible():
            return False
        as_whole = getattr(names.get("self"), "fullgraph", False) or not all(map(callable, given))
        self.taken = self.calls.take_step(opt, self.calls.wrapper.kwargs, bool(given), as_whole)
        if self.taken is None:
            return False
        steps_as_python.leave_to_python()
        return True

    def __exit__(self, *_: Any) -> None:
        try:
            self._end()
        finally:
            if self.listened is not None:
                self.listened.__exit__(None, None, None)
                self.listened = None

    def _end(self) -> None:
        """Undo what was changed for the call, and say what became of it."""
        if self.taken is not None:
            steps_as_python.forget()
            self.taken()
            self.function = self.optimizer = None
            return
        if self.undo is not None:
            self.undo()
            _steps.pop()
        if self.calls.is_known:
            return
        why = [text for text, count in _reasons().items() if count > self.reasons.get(text, 0)]
        found = self._verdict(why)
        if sys.exc_info()[1] is not self.error:  # torch does not say that a call raised
            return
        if found is not None:
            store.nothing_compiled(found)
            warn_user(f"fp8: {found.failure}")
            self.calls.is_warned = True
        self.calls.is_known = found is not None or runs != self.before
        self.function = self.optimizer = None

    def _verdict(self, why: Sequence[str]) -> Plan | None:
        """Return a plan that says why nothing was compiled; None if something was, or nothing was to be."""
        if runs.matmuls > self.before.matmuls:
            return None
        name, code = _name_of(self.function, self.optimizer), _code_of(self.function)
        if runs.graphs > self.before.graphs or runs.asked > self.before.asked:
            return uncompiled_calls.without_matmuls(name, why) if self.optimizer is None else None
        if counters["frames"]["total"] == self.frames:
            return self._untried(name, code) if _is_on() else None
        why = uncompiled_calls.unwanted(why, self.optimizer)
        if why and code is not None:
            _given_up[code] = why
        return uncompiled_calls.plan(name, self.optimizer, why) if why else None

    def _untried(self, name: str, code: CodeType | None) -> Plan | None:
        """Return the plan of a call that Dynamo did not even try to compile."""
        if code is not None and code in _given_up:
            return uncompiled_calls.plan(name, self.optimizer, _given_up[code], is_earlier=True)
        module = getattr(self.function, "__self__", None)
        by_itself = getattr(self.function, "__name__", "") == "_call_impl"  # module.compile()
        if by_itself and isinstance(module, torch.nn.Module) and trace_rules.check(module.forward):
            return uncompiled_calls.in_place(name)
        return None


class _Reset:
    """An object that `torch.compiler.reset()` finds among the backends whose code it forgets."""

    reset = staticmethod(reset)


def _reasons() -> dict[str, int]:
    """Return the reasons why Dynamo has left code to Python, with counts."""
    return {**counters["unimplemented"], **counters["graph_break"]}


def _is_on() -> bool:
    return getattr(getattr(eval_frame, "_stance", None), "stance", "default") == "default"


def reading_numbers() -> Callable[[], Any]:
    """Let Dynamo trace `Tensor.item()`, as its own contexts change a setting for a call; return what undoes it."""
    return dynamo_config._make_closure_patcher(capture_scalar_outputs=True)()  # type: ignore[attr-defined]


def _called() -> tuple[Any, Optimizer | None, Mapping[str, Any]]:
    """Return the function whose compiled form is called, the optimizer whose step it is, and the names of the call."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__ and "fn" in (names := frame.f_locals) and "args" in names:
            function = names["fn"]
            owners = [_owner(function), *names["args"][:1]]
            return function, next((x for x in owners if isinstance(x, Optimizer)), None), names
        frame = frame.f_back
    return None, None, {}


def _owner(function: Any) -> Any:
    """Return the object of a method, also where torch put a function around it."""
    while function is not None:
        for owner in (function, getattr(function, "__self__", None)):
            if isinstance(owner, (Optimizer, torch.nn.Module)):
                return owner
        function = getattr(function, "__wrapped__", None)
    return None


def _name_of(function: Any, optimizer: Optimizer | None) -> str:
    if optimizer is not None:
        return f"{type(optimizer).__name__}.step"
    owner = _owner(function)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return getattr(function, "__qualname__", type(function).__name__)


def _code_of(function: Any) -> CodeType | None:
    """Return the code that Dynamo compiles or leaves. All modules whose call torch wraps itself share one."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return getattr(owner.forward, "__code__", None)
    return getattr(function, "__code__", None)
