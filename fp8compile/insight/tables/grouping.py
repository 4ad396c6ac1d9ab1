"""Repeated layers as one: rows of a plan gathered by module, equal modules of different number by pattern.

layers.0.mlp.up, layers.1.mlp.up, …   with equal rows   →   layers.{0-31}.mlp.up  ×32
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from fp8compile.optimizer.parameter_groups import plain_bytes
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import CHOSEN
from fp8compile.plan.rows import Kernel, Matmul, Recomputed, Saved, State, Transfer

ROLES = ("output", "grad_input", "grad_weight", "other")
NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
NUMBER_OF = re.compile(r"\d+(?= elements)")  # in reasons that differ in the size of a parameter only
ANY_NUMBER = re.compile(r"(?<![\w.'\"-])\d+(?:\.\d+)?(?![\w'\"])")  # not those of names: "e4m3", skip='2'
Row = TypeVar("Row", Matmul, Saved, Recomputed, Transfer)


@dataclass(frozen=True)
class Layers:
    """Modules with equal rows: their common path, how many they are, the user's line, each row with its count."""

    path: str
    count: int
    source: str
    rows: tuple[tuple[Any, int], ...]


def matmul_groups(plan: Plan) -> list[Layers]:
    """Return the matmuls of a graph by module, in the order in which the model runs them."""
    return _grouped(plan, plan.matmuls, _matmul_key, lambda m: ROLES.index(m.role))


def saved_groups(plan: Plan) -> list[Layers]:
    """Return the saved tensors of a graph by module."""
    return _grouped(plan, plan.saved, _saved_key, lambda row: 0)


def transfer_groups(plan: Plan) -> list[Layers]:
    """Return what ranks hand each other in a graph, by module."""
    return _grouped(plan, plan.transfers, _transfer_key, lambda row: 0)


def restored_groups(plan: Plan) -> list[Layers]:
    """Return the values that backward computes again, by module."""
    return _grouped(plan, plan.restored, _restored_key, lambda row: 0)


def kernel_groups(plan: Plan) -> list[tuple[Kernel, int]]:
    """Return equal kernels of one half as one, with their count; the largest traffic first."""
    counts = Counter((k.half, k.name) for k in plan.kernels)
    first = {(k.half, k.name): k for k in reversed(plan.kernels)}
    found = [(first[key], count) for key, count in counts.items()]
    return sorted(found, key=lambda pair: (-pair[0].moved * pair[1], pair[0].half, pair[0].name))


@dataclass(frozen=True)
class States:
    """Optimizer states that became the same for the same reason: one of them, how many, their elements and bytes.

    reason: why, for all of them: "small: 64 to 128 elements" where their sizes differ.
    """

    first: State
    reason: str
    count: int
    elements: int
    before: int
    after: int


def state_groups(plan: Plan) -> list[States]:
    """Return the states of an optimizer by name, format and reason; the largest first."""
    groups: dict[Hashable, list[State]] = {}
    for row in plan.states:
        groups.setdefault((row.name, row.dtype, row.format, NUMBER_OF.sub("…", row.reason)), []).append(row)
    found = []
    for same in groups.values():
        elements = sum(prod(row.shape) for row in same)
        before = sum(map(plain_bytes, same))
        reason = ranged([row.reason for row in same])
        found.append(States(same[0], reason, len(same), elements, before, sum(row.bytes for row in same)))
    return sorted(found, key=lambda g: (-g.before, g.first.name))


def alike(reasons: Mapping[str, int], number: re.Pattern[str] = NUMBER_OF) -> dict[str, int]:
    """Return the counts of reasons, those that differ in numbers alone as one, the most frequent first."""
    same: dict[str, Counter[str]] = {}
    for why, count in reasons.items():
        same.setdefault(number.sub("…", why), Counter())[why] += count
    found = {ranged(list(counts), number): counts.total() for counts in same.values()}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def ranged(reasons: Sequence[str], number: re.Pattern[str] = NUMBER_OF) -> str:
    """Return one text of reasons that differ in these numbers only: "64 to 128 elements" for what lies between."""
    texts = iter([_range(column) for column in zip(*(number.findall(reason) for reason in reasons), strict=True)])
    return number.sub(lambda _: next(texts), reasons[0])


def _range(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=float), max(numbers, key=float)
    return least if least == most else f"{least} to {most}"


def _matmul_key(m: Matmul) -> Hashable:
    casts = (m.left, m.right, m.fast_accumulation, len(m.merged), m.padded)
    times = tuple(None if t is None else round(t, 6) for t in (m.milliseconds_bf16, m.milliseconds_fp8))
    # addmm is mm with a bias: the backward half has no addmm, and no reader needs the difference
    sizes = (m.batch, m.groups, m.m, m.n, m.k)
    reason = m.reason.partition(CHOSEN)[0]  # what was measured differs in every layer
    return (m.role, m.kind.removeprefix("add"), sizes, m.dtype, m.decision, reason, casts, times)


def _saved_key(row: Saved) -> Hashable:
    return (row.shape, row.dtype, row.form, row.bytes, row.reason)


def _transfer_key(row: Transfer) -> Hashable:
    return (row.kind, row.half, row.shape, row.dtype, row.form, row.before, row.after, row.reason)


def _restored_key(row: Recomputed) -> Hashable:
    """Return what is shown, without the names of nodes: they differ from layer to layer."""
    sources = tuple((source == "parameters", source.partition(" ")[2]) for source in row.sources)
    return (row.shape, row.dtype, row.bytes, sources)


def _grouped(
    plan: Plan, rows: Sequence[Row], key: Callable[[Row], Hashable], rank: Callable[[Row], int]
) -> list[Layers]:
    modules: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        modules.setdefault((row.path, plan.line(row)), []).append(row)
    groups: dict[Hashable, list[tuple[str, list[tuple[Row, int]]]]] = {}
    for (path, source), members in modules.items():
        lines = _counted(sorted(members, key=rank), key)
        signature = (NUMBER.sub("*", path), source, tuple((key(row), count) for row, count in lines))
        groups.setdefault(signature, []).append((path, lines))
    return [
        Layers(pattern([path for path, _ in group]), len(group), plan.line(group[0][1][0][0]), tuple(group[0][1]))
        for group in groups.values()
    ]


def _counted(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[tuple[Row, int]]:
    lines: dict[Hashable, list[Row]] = {}
    for row in rows:
        lines.setdefault(key(row), []).append(row)
    return [(same[0], len(same)) for same in lines.values()]


def pattern(paths: Sequence[str]) -> str:
    """Return one text of paths that differ in numbers only: "layers.{0-3,5}.up"; `*` where numbers make no grid."""
    numbers = [tuple(int(n) for n in NUMBER.findall(path)) for path in paths]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    is_grid = prod(len(c) for c in columns) == len(set(numbers))
    texts = iter(_ranges(c) if is_grid or len(c) == 1 else "*" for c in columns)
    return NUMBER.sub(lambda _: next(texts), paths[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Return [0, 1, 2, 5] as "{0-2,5}"; one number stays itself."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
