"""Several plans read as one: each table is that of all graphs, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import TypeVar

from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import (
    Group,
    Kernel,
    Loss,
    Lowered,
    Mask,
    Matmul,
    MergedUpdate,
    Recomputed,
    Saved,
    State,
    Transfer,
)

T = TypeVar("T")


class AllGraphs:
    """The tables of a `Plan`, of several plans: see there for what each is."""

    plans: list[Plan]

    @property
    def graph(self) -> str:
        """The kinds of these graphs, each once: "training, optimizer"."""
        return _once(plan.graph for plan in self.plans)

    @property
    def recipe(self) -> str:
        """The recipes, each once."""
        return _once(plan.recipe for plan in self.plans)

    @property
    def device(self) -> str:
        """The devices, each once."""
        return _once(plan.device for plan in self.plans)

    @property
    def failure(self) -> str:
        """The reasons why no pass ran on graphs; "" if passes ran on all of them."""
        return _once(plan.failure for plan in self.plans)

    @property
    def matmuls(self) -> list[Matmul]:
        """All matmuls."""
        return _all(plan.matmuls for plan in self.plans)

    @property
    def converted(self) -> list[Matmul]:
        """Rows that run in FP8."""
        return _all(plan.converted for plan in self.plans)

    @property
    def kept(self) -> list[Matmul]:
        """Rows that were left as they are."""
        return _all(plan.kept for plan in self.plans)

    def reasons(self) -> Counter[str]:
        """Return how many matmuls were left, by reason."""
        return Counter(m.reason for m in self.kept)

    def row(self, node: str) -> Matmul | None:
        """Return the row of the matmul at graph node `node`, in the first graph that has one."""
        return next((m for m in self.matmuls if m.node == node), None)

    @property
    def saved(self) -> list[Saved]:
        """The tensors that forward halves keep for backward halves."""
        return _all(plan.saved for plan in self.plans)

    @property
    def saved_bytes(self) -> int:
        """Bytes of it, parameters left out."""
        return sum(plan.saved_bytes for plan in self.plans)

    @property
    def recomputed(self) -> dict[str, int]:
        """The number of nodes of each operator that are computed again."""
        return dict(sum((Counter(plan.recomputed) for plan in self.plans), Counter[str]()))

    @property
    def restored(self) -> list[Recomputed]:
        """Values that are computed again."""
        return _all(plan.restored for plan in self.plans)

    @property
    def halves(self) -> dict[str, Lowered]:
        """The kernels and updates of all forward halves together, of all backward halves, …"""
        names = dict.fromkeys(name for plan in self.plans for name in plan.halves)
        return {name: _together([p.halves[name] for p in self.plans if name in p.halves]) for name in names}

    @property
    def kernels(self) -> list[Kernel]:
        """Generated kernels."""
        return _all(plan.kernels for plan in self.plans)

    @property
    def losses(self) -> list[Loss]:
        """Cross-entropies with large logits."""
        return _all(plan.losses for plan in self.plans)

    @property
    def masks(self) -> list[Mask]:
        """Attention masks that are not made."""
        return _all(plan.masks for plan in self.plans)

    @property
    def transfers(self) -> list[Transfer]:
        """The tensors that ranks hand each other."""
        return _all(plan.transfers for plan in self.plans)

    @property
    def groups(self) -> list[Group]:
        """Groups of parameters of optimizers."""
        return _all(plan.groups for plan in self.plans)

    @property
    def states(self) -> list[State]:
        """States of optimizers."""
        return _all(plan.states for plan in self.plans)

    @property
    def updates(self) -> list[MergedUpdate]:
        """Updates of parameters, as they were merged."""
        return _all(plan.updates for plan in self.plans)


def _all(tables: Iterable[list[T]]) -> list[T]:
    return [row for table in tables for row in table]


def _once(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def _together(halves: list[Lowered]) -> Lowered:
    tables = [f.name for f in fields(Lowered) if f.name not in ("failure", "kept")]
    rows = {name: _all(getattr(half, name) for half in halves) for name in tables}
    failure, kept = _once(half.failure for half in halves), sum(half.kept for half in halves)
    return Lowered(**rows, failure=failure, kept=kept)
