"""Warnings about finished plans: nothing converted, weights that arrived in vain, patterns that name nothing, failures
that a cache kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from fp8compile.options import Options, matching
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import FP8, Matmul
from fp8compile.torch_hooks.calls.user_frame import warn_user

# Left on purpose: a graph of nothing else is no surprise.
BY_DEFAULT = {Reason.HEAD, Reason.RECIPE, Reason.OPERATIONS, Reason.PLAN, Reason.ADAPTIVE, Reason.CHUNKED_LOSS}
_matched: set[str] = set()  # patterns that have matched, or of which was said that they have not
_layers: dict[str, bool] = {}  # of models that are compiled, by path: whether a graph has had it


def note_layers(model: nn.Module, compiled: Collection[str]) -> None:
    """Know the layers of a model, of which this graph has those in `compiled`: a pattern may name one still to come."""
    for name, module in model.named_modules():
        if any(p.dim() > 1 for p in module.parameters(recurse=False)):
            _layers.setdefault(name, False)
    _layers.update(dict.fromkeys(compiled, True))


def warn_again(plan: Plan) -> None:
    """Warn of what failed when this graph was compiled, which still has its consequences."""
    for half, lowered in plan.halves.items():
        if lowered.failure:
            warn_user(
                f"fp8: the {half} graph, found in a cache, was compiled without generated kernels: {lowered.failure}"
            )
    if plan.failure:
        warn_user(f"fp8: this graph, found in a cache, was compiled without FP8: {plan.failure}")


def warn(plans: Sequence[Plan], options: Options) -> None:
    """Warn of what the plans of one call leave undone and its user may not expect."""
    matmuls = [m for plan in plans if not plan.failure for m in plan.matmuls]  # a failure has been told
    candidates = [m for m in matmuls if _could_be(m)]
    if candidates and not any(m.decision == FP8 for m in matmuls):
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


def _rounded(plans: Sequence[Plan]) -> str:
    """Return a sentence about saved activations that are rounded in graphs without FP8 matmuls."""
    saved = [row for plan in plans for row in plan.saved]
    if count := sum(row.form != row.dtype for row in saved):
        return (
            f" {count} of {len(saved)} tensors saved for backward are rounded to FP8 all the same, as option save or a "
            "plan says; without that nothing is rounded."
        )
    return " What is saved for backward keeps its precision, so that nothing is rounded." if saved else ""


def _check_patterns(option: str, patterns: Sequence[str], what: str, paths: set[str], shown_paths: set[str]) -> None:
    """Warn once of each pattern that names none of the `paths`, nor a layer that a later graph may have."""
    _matched.update(f"{option} {p}" for p in patterns for path in paths if matching([p], path))
    for pattern in patterns:
        if shown_paths and f"{option} {pattern}" not in _matched and not _is_to_come(pattern):
            _matched.add(f"{option} {pattern}")
            listed = sorted(path or "(the model itself)" for path in shown_paths)
            shown = ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")
            warn_user(f"fp8: {option} pattern {pattern!r} matches no {what} of this graph. Paths here: {shown}.")


def _could_be(matmul: Matmul) -> bool:
    """Return True if leaving this matmul may surprise its user: attention (bmm) and the defaults' exceptions do not."""
    is_known = matmul.code in BY_DEFAULT or matmul.code == Reason.EMPTY  # a batch without rows
    return (matmul.role != "other" or matmul.kind in ("mm", "addmm")) and not is_known


def _is_to_come(pattern: str) -> bool:
    """Return True if a pattern names a layer that no graph has had."""
    return any(not had and matching([pattern], layer) for layer, had in _layers.items())
