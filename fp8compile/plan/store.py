"""Plans of what this process has compiled; kept on disk beside torch's compile caches as well.

On a warm cache torch calls no pass, so a plan that was not kept would be lost: it is stored under a key of the graph,
its inputs and the compiler, in the folder of Inductor's own cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8compile import process_state
from fp8compile.cache_folder import cache_folder
from fp8compile.insight.explanation import Explanation
from fp8compile.insight.tables.text import one_line
from fp8compile.options import Options
from fp8compile.plan.from_json import lowered_from
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import Lowered, Matmul, Plan, Recomputed, Saved
from fp8compile.torch_hooks.compilations import Compilations, Frame
from fp8compile.torch_hooks.user_frame import calling_line, warn_user

# Left on purpose: a graph of nothing else is no surprise.
BY_DEFAULT = {Reason.HEAD, Reason.RECIPE, Reason.OPERATIONS, Reason.PLAN, Reason.ADAPTIVE, Reason.CHUNKED_LOSS}
logger = logging.getLogger("fp8compile")  # quiet unless asked: TORCH_LOGS="fp8compile", or logging's own ways
_compiled = Compilations()
_matched: set[str] = set()  # skip patterns that have matched, or of which was said that they have not


@contextlib.contextmanager
def collected() -> Iterator[list[Plan]]:
    """Plans of what is compiled in this context go to the list it gives, and not to `compiles()`.

    At the end it also gets those of calls that compiled nothing."""
    global _compiled
    before, _compiled = _compiled, Compilations()
    try:
        yield (found := _compiled).plans
        found.plans.extend(found.nothing)
    finally:
        _compiled = before


def last_compile() -> Explanation:
    """What `explain` tells, of what was compiled last, without compiling again; also where a cache had it.

    All graphs that the last call of a compiled function made (graph breaks make several), one without matmuls left out;
    graphs which that call found compiled are not in it. If torch compiled nothing of it, `failure` says why.
    An optimizer that was compiled after a model does not hide it: where graphs with matmuls have been compiled, it is
    of those. `compiles()` has everything. Raises `LookupError` before the first, and after `torch.compiler.reset()`.
    """
    if found := _compiled.last():
        return Explanation(found)
    raise LookupError("nothing has been compiled with backend='fp8' yet: call the compiled model once")


def nothing_compiled(plan: Plan) -> None:
    """A call of a compiled function reached no graph, as `plan` says."""
    _compiled.add_call(plan)
    logger.info("%s", plan.failure)


def compiles() -> list[Plan]:
    """The plans of all graphs that this process has compiled, oldest first (graph breaks make several)."""
    return list(_compiled.plans)


def reset() -> None:
    """Forget all plans."""
    process_state.reset_module(__name__)


def key(gm: fx.GraphModule, inputs: Sequence[Any], compiler: str) -> str:
    """A key for the graph, its inputs' types, and the compiler with its options."""
    types = [
        f"{x.dtype}{list(x.shape)}{list(x.stride())}{x.device}{getattr(x, 'granularity', '')}"
        if isinstance(x, torch.Tensor)
        else str(x)
        for x in inputs
    ]
    text = "\n".join([compiler, str(torch.is_grad_enabled()), gm.code, *types])
    return hashlib.sha256(text.encode()).hexdigest()


class Record:
    """What one call of the backend decides, kept on disk as it grows: on a warm cache no pass runs.

    The plan comes with the joint graph, each half's kernels when that half is compiled; backward may come much later.
    """

    def __init__(
        self,
        key: str,
        options: Options,
        also: Callable[[Sequence[Plan]], None] | None = None,
        optimizer: Plan | None = None,
    ):
        """`also` sees the plans whenever they are written. optimizer: what is known of one before any pass runs: its
        settings may have changed since a cache was filled."""
        self.plans: list[Plan] = []
        self.optimizer = optimizer
        self.options = options
        self._also = also
        self._called = calling_line()
        self._file = cache_folder() / f"{key}.json"

    def add(self, plan: Plan) -> None:
        """The plan of a joint or inference graph; what follows belongs to it."""
        plan.called = self._called
        self.plans.append(plan)

    def add_saved(self, saved: list[Saved], recomputed: dict[str, int], restored: list[Recomputed]) -> None:
        """What the forward half keeps for the backward half, and what backward computes again: operators, values."""
        if self.plans:
            plan = self.plans[-1]
            plan.saved, plan.recomputed, plan.restored = saved, recomputed, restored

    def add_half(self, half: str, lowered: Lowered) -> None:
        """What became of a half."""
        if self.plans:
            self.plans[-1].halves[half] = lowered
            self.write()

    def write(self) -> None:
        """Keep everything for later processes."""
        _write(self._file, "\n---\n".join(plan.to_json() for plan in self.plans))
        if self._also is not None:
            self._also(self.plans)

    def close(self, frame: Frame | None = None) -> None:
        """The call is over: if all of it came from a cache, look up what was decided then; say what went undone.

        frame: where the graph comes from."""
        if self.plans:
            self.write()
        elif self._file.exists():
            self.plans = [Plan.from_json(text) for text in self._file.read_text().split("\n---\n")]
            if self.optimizer is not None:
                self.plans = [replace(self.optimizer, halves=plan.halves) for plan in self.plans]
            for plan in self.plans:
                plan.called = self._called
                _warn_again(plan)
        _compiled.add(self.plans, frame)
        for plan in self.plans:
            logger.info("%s", one_line(plan))
        _warn(self.plans, self.options)


def remember_half(key: str, lowered: Lowered) -> None:
    """Keep what became of a half, by its graph: a cache may have it when it has not the joint graph."""
    _write(cache_folder() / f"half_{key}.json", json.dumps(asdict(lowered)))


def recall_half(key: str) -> Lowered | None:
    """What `remember_half` kept."""
    file = cache_folder() / f"half_{key}.json"
    return lowered_from(json.loads(file.read_text())) if file.exists() else None


def _warn_again(plan: Plan) -> None:
    """What failed when this graph was compiled still has its consequences."""
    for half, lowered in plan.halves.items():
        if lowered.failure:
            warn_user(
                f"fp8: the {half} graph, found in a cache, was compiled without generated kernels: {lowered.failure}"
            )
    if plan.failure:
        warn_user(f"fp8: this graph, found in a cache, was compiled without FP8: {plan.failure}")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as temporary:
        temporary.write(text)
    os.replace(name, file)


def _warn(plans: list[Plan], options: Options) -> None:
    matmuls = [m for plan in plans if not plan.failure for m in plan.matmuls]  # a failure has been told
    candidates = [m for m in matmuls if _could_be(m)]
    if candidates and not any(m.decision == "fp8" for m in matmuls):
        main = Counter(m.reason for m in candidates).most_common(3)
        listed = "; ".join(f"{count}× {reason}" for reason, count in main)
        warn_user(f"fp8: NOTHING was converted in a graph with {len(candidates)} matmuls: {listed}.{_rounded(plans)}")
    for remark in (Reason.READ_ROUNDED, Reason.CAST_AGAIN):
        found = [m for m in matmuls if remark in m.remarks]
        if found:
            example = f"{found[0].path or 'the model itself'} {found[0].role}: {found[0].reason}"
            warn_user(f"fp8: {len(found)} matmuls do not take a weight as it was gathered. {example}.")
    _check_patterns("skip", options.skip, "matmul", {m.path for m in matmuls}, {m.path for m in candidates})
    kept = {row.path for plan in plans for row in plan.saved} | {m.path for m in matmuls}
    forms = [pattern for pattern, _ in options.save if pattern != "*"]
    _check_patterns("save", forms, "module with matmuls or saved activations", kept, kept)


def _rounded(plans: list[Plan]) -> str:
    """What of the saved activations of graphs without FP8 matmuls is rounded all the same, as a sentence."""
    saved = [row for plan in plans for row in plan.saved]
    if count := sum(row.form != row.dtype for row in saved):
        return (
            f" {count} of {len(saved)} tensors saved for backward are rounded to FP8 all the same, as option save or a "
            "plan says; without that nothing is rounded."
        )
    return " What is saved for backward keeps its precision, so that nothing is rounded." if saved else ""


def _check_patterns(option: str, patterns: Sequence[str], what: str, paths: set[str], shown_paths: set[str]) -> None:
    """Say once of each pattern that it names none of the `paths`; a later graph, after a graph break, may match it."""
    _matched.update(f"{option} {p}" for p in patterns for path in paths if _names(p, path))
    for pattern in patterns:
        if shown_paths and f"{option} {pattern}" not in _matched:
            _matched.add(f"{option} {pattern}")
            listed = sorted(path or "(the model itself)" for path in shown_paths)
            shown = ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")
            warn_user(f"fp8: {option} pattern {pattern!r} matches no {what} of this graph. Paths here: {shown}.")


def _could_be(matmul: Matmul) -> bool:
    """Whether leaving this matmul may surprise its user: attention (bmm) and what everybody's default leaves do not."""
    return (matmul.role != "other" or matmul.kind in ("mm", "addmm")) and matmul.code not in BY_DEFAULT


def _names(pattern: str, path: str) -> bool:
    return Options(skip=(pattern,)).skips(path) is not None
