"""Which tensors a step that is under way has in its variables.

    def step(self):                                     def update(self, p, m):     # traced; both have m
        for p in params:                                    m.lerp_(p.grad, 0.1)
            m = self.state[p]["m"]                          if p.grad.norm() > 1:   # where Dynamo breaks the graph
            self.update(p, m)                                   …

Dynamo takes a step with graph breaks function by function, so a backend may see one of them in the middle of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile.calling_line import OURS

OPTIMIZERS = f"{Path(torch.__file__).parent}/optim/"  # what of torch is a step, not the compiler
DEPTH = 3  # of containers: groups of lists of states, say


def tensors_held(opt: Optimizer, arguments: Mapping[str, Any]) -> set[int]:
    """Ids of the tensors in the variables of the running functions of a step of `opt`, and among the `arguments` of the
    one that is traced. What the optimizer itself has is in no variable."""
    own = {id(opt.state), id(opt.param_groups), *map(id, chain(opt.state.values(), opt.param_groups))}
    found: set[int] = set()
    for value in chain(arguments.values(), *(names.values() for names in _variables(opt))):
        found |= _tensors(value, own, DEPTH)
    return found


def _variables(opt: Optimizer) -> list[Mapping[str, Any]]:
    """Those of each running function, from here to the outermost one that is a method of `opt`."""
    frame: FrameType | None = sys._getframe(1)
    running: list[Mapping[str, Any]] = []
    step = 0
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OPTIMIZERS) or not file.startswith(OURS):
            running.append(frame.f_locals)
            step = len(running) if frame.f_locals.get("self") is opt else step
        frame = frame.f_back
    return running[:step]


def _tensors(value: Any, own: Collection[int], depth: int) -> set[int]:
    if isinstance(value, Tensor):
        return {id(value)}
    if not depth or id(value) in own or not isinstance(value, (list, tuple, set, dict)):
        return set()
    parts = value.values() if isinstance(value, dict) else value
    return set().union(*(_tensors(part, own, depth - 1) for part in parts))
