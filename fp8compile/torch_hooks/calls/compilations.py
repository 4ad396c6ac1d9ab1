"""What has been compiled, call by call: which graphs belong together, as Dynamo hands them over one by one.

A graph belongs to the call before it if it is of the same compiled function (another frame after a graph break, or the
same code for another module), and to a new call if its frame, with its parameters, has been compiled before. Private
API of torch, imported here only: the frame under trace. What is compiled outside of Dynamo is a call of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator  # knows the frame under trace

from fp8compile.plan.plan import Plan


@dataclass(frozen=True)
class Frame:
    """Where a graph comes from: what one torch.compile made of the backend, the code, and ids of its parameters."""

    function: Callable[[], object]  # a weak reference
    code: CodeType
    parameters: frozenset[int]


def translator() -> InstructionTranslator | None:
    """Return what traces the frame whose graph Dynamo is handing over; None outside of Dynamo."""
    try:
        return InstructionTranslator.current_tx()  # torch 2.12 has None outside, 2.11 and 2.13 raise
    except AttributeError:
        return None


def current_frame(inputs: Sequence[Any]) -> Frame | None:
    """Return the frame whose graph, with these inputs, Dynamo is handing over; None outside of Dynamo."""
    tx = translator()
    if tx is None:
        return None
    parameters = frozenset(id(x) for x in inputs if isinstance(x, torch.nn.Parameter))
    return Frame(weakref.ref(tx.output.compiler_fn), (tx.output.root_tx or tx).f_code, parameters)


@dataclass
class Call:
    """Plans of the graphs that one call of a compiled function has compiled, oldest first."""

    plans: list[Plan] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def takes(self, frame: Frame | None, plans: Sequence[Plan]) -> bool:
        """Return True if a graph of `frame`, with these plans, is of this call; one without matmuls begins no call."""
        if frame is None or not self.frames or self.frames[-1].function() is not frame.function():
            return False
        return frame not in self.frames or not any(plan.matmuls for plan in plans)


def reportable(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that have matmuls, an optimizer or a failure; if none has, the first."""
    return [p for p in plans if p.matmuls or p.failure or p.states or p.updates] or list(plans[:1])


@dataclass
class Compilations:
    """All plans, oldest first, and the calls that made them."""

    plans: list[Plan] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    nothing: list[Plan] = field(default_factory=list)  # of calls that compiled nothing, which say why

    def add(self, plans: Sequence[Plan], frame: Frame | None) -> None:
        """Add the plans of one graph."""
        self.plans.extend(plans)
        if not self.calls or not self.calls[-1].takes(frame, plans):
            self.calls.append(Call())
        self.calls[-1].plans.extend(plans)
        self.calls[-1].frames += [frame] if frame is not None else []

    def add_call(self, plan: Plan) -> None:
        """Add a call that compiled nothing; `plan` says why."""
        self.nothing.append(plan)
        self.calls.append(Call([plan]))

    def clear(self) -> None:
        """Forget all plans and calls."""
        for kept in (self.plans, self.calls, self.nothing):
            kept.clear()

    def last(self) -> list[Plan]:
        """Return the plans of the last call that compiled matmuls; if none did, of an optimizer's last, or the last."""
        for wanted in (_has_matmuls, _has_optimizer, lambda plan: True):
            for call in reversed(self.calls):
                if any(map(wanted, call.plans)):
                    return reportable(call.plans)
        return []


def _has_matmuls(plan: Plan) -> bool:
    return bool(plan.matmuls or (plan.failure and plan.graph != "optimizer"))


def _has_optimizer(plan: Plan) -> bool:
    return bool(plan.states or plan.updates or plan.failure)
