"""The decisions of one call of the backend, kept on disk beside torch's compile caches.

On a warm cache torch calls no pass, so a plan that was not kept would be lost: it is stored under a key of the graph,
its inputs and the compiler, in the folder of Inductor's own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves  # under compiled autograd an input is a list

from fp8compile.cache_folder import cache_folder
from fp8compile.options import Options
from fp8compile.plan import plan_warnings, store
from fp8compile.plan.plan import Plan
from fp8compile.plan.read_rows import lowered_from
from fp8compile.plan.rows import Lowered, Recomputed, Saved
from fp8compile.torch_hooks.calls.compilations import Frame
from fp8compile.torch_hooks.calls.user_frame import calling_line


def key_of(gm: fx.GraphModule, inputs: Sequence[Any], compiler: str) -> str:
    """Return a key of the graph, its inputs' types, and the compiler with its options."""
    types = [
        f"{x.dtype}{list(x.shape)}{list(x.stride())}{x.device}{getattr(x, 'granularity', '')}"
        if isinstance(x, torch.Tensor)
        else str(x)
        for x in tree_leaves(inputs)  # an input may be a list, whose text would have all numbers
    ]
    text = "\n".join([compiler, str(torch.is_grad_enabled()), gm.code, *types])
    return hashlib.sha256(text.encode()).hexdigest()


class Record:
    """The decisions of one call of the backend, written as they are made.

    The plan comes with the joint graph, each half's kernels when that half is compiled; backward may come much later.
    """

    def __init__(
        self,
        key: str,
        options: Options,
        also: Callable[[Sequence[Plan]], None] | None = None,
        optimizer: Plan | None = None,
    ):
        """Begin a record. also: is called with the plans whenever they are written. optimizer: what is known of one
        before any pass runs: its settings may have changed since a cache was filled."""
        self.plans: list[Plan] = []
        self.optimizer = optimizer
        self.options = options
        self._also = also
        self._called = calling_line()
        self._file = cache_folder() / f"{key}.json"

    def add(self, plan: Plan) -> None:
        """Add the plan of a joint or inference graph; what follows belongs to it."""
        plan.called = self._called
        self.plans.append(plan)

    def add_saved(self, saved: list[Saved], recomputed: dict[str, int], restored: list[Recomputed]) -> None:
        """Add what forward keeps for backward, and the operators and values that backward computes again."""
        if self.plans:
            plan = self.plans[-1]
            plan.saved, plan.recomputed, plan.restored = saved, recomputed, restored

    def add_half(self, half: str, lowered: Lowered) -> None:
        """Add what became of a half."""
        if self.plans:
            self.plans[-1].halves[half] = lowered
            self.write()

    def add_kept(self, half: str, kept: int) -> None:
        """Add how many bytes of casts are kept that a half computes, which has been added."""
        if self.plans and half in self.plans[-1].halves:
            self.add_half(half, replace(self.plans[-1].halves[half], kept=kept))

    def write(self) -> None:
        """Keep everything for later processes."""
        _write(self._file, "\n---\n".join(plan.to_json() for plan in self.plans))
        if self._also is not None:
            self._also(self.plans)

    def close(self, frame: Frame | None = None) -> None:
        """End the call: if all of it came from a cache, look up what was decided then; warn of what went undone.

        frame: where the graph comes from."""
        if self.plans:
            self.write()
        elif self._file.exists():
            self.plans = [Plan.from_json(text) for text in self._file.read_text().split("\n---\n")]
            if self.optimizer is not None:
                self.plans = [replace(self.optimizer, halves=plan.halves) for plan in self.plans]
            for plan in self.plans:
                plan.called = self._called
                plan_warnings.warn_again(plan)
        store.compiled(self.plans, frame)
        plan_warnings.warn(self.plans, self.options)


def remember_half(key: str, lowered: Lowered) -> None:
    """Keep what became of a half, by its graph: a cache may have it when it has not the joint graph."""
    _write(cache_folder() / f"half_{key}.json", json.dumps(asdict(lowered)))


def recall_half(key: str) -> Lowered | None:
    """Return what `remember_half` kept; None where it kept nothing."""
    file = cache_folder() / f"half_{key}.json"
    return lowered_from(json.loads(file.read_text())) if file.exists() else None


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as temporary:
        temporary.write(text)
    os.replace(name, file)
