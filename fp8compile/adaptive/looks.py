"""When the casts of a graph are measured: in one step each, ever more rarely while nothing changes.

A graph may be executed several times for a step of the optimizer, on other data each time: micro-batches, or real and
made-up samples. So the numbers of executions between looks are irregular: all of a cycle are seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8compile.adaptive.ranks import Agreement
from fp8compile.plan import cast_statistics
from fp8compile.plan.cast_rows import Row

SPREAD = 2654435761  # 2³² divided by the golden ratio: multiples of it are spread evenly (Knuth)
PATIENCE = 4  # executions that a look waits for the backward pass of its step


@dataclass
class Looks:
    """The looks at one graph; all ranks take them together.

    name: of the graph's statistics. every: the most steps between two looks. done: looks whose evidence was read.
    is_open: one has begun whose evidence is not read.
    """

    name: str
    every: int
    ranks: Agreement
    done: int = field(default=0, init=False)
    is_open: bool = field(default=False, init=False)
    _due: int = field(default=0, init=False)  # the step of the next one
    _gap: int = field(default=0, init=False)  # steps from the last one to that
    _began: int = field(default=0, init=False)  # the step of the last one
    _waited: int = field(default=0, init=False)  # executions since then

    def is_due(self, step: int) -> bool:
        """Return True if this step should be measured."""
        return step >= self._due and not self.is_open

    def begin(self, step: int) -> None:
        """Measure this step."""
        self.is_open, self._began, self._waited = True, step, 0
        cast_statistics.start(self.name, 1)

    def read(self, casts: int) -> list[Row] | None:
        """Return what the open look has measured; None while evidence of that many casts is missing on some rank."""
        there = sum(1 for row in cast_statistics.rows(self.name) if row.steps and row.role != "saved")
        self._waited += 1
        if not all(self.ranks.gathered("casts", there >= casts)) and self._waited < PATIENCE:
            return None
        if not self.ranks.is_alone:
            cast_statistics.join(self.name, self.ranks.gathered("evidence", cast_statistics.sums(self.name)))
        rows = [row for row in cast_statistics.rows(self.name) if row.steps]
        self._close()
        self.done += 1
        return rows

    def begin_anew(self, step: int) -> None:
        """Look at this step, and often after it; what an open look has measured is forgotten."""
        self._close()
        self._gap, self._due = 0, step

    def become_due(self, step: int) -> None:
        """Look at this step, as nothing was measured in the last look."""
        self._due = step

    def become_rarer(self) -> None:
        """Wait for twice as many steps as before the last look, and one more; for fewer than `every`, by up to 7."""
        fewer = (self.done * SPREAD >> 16) % min(8, self.every)
        self._gap = min(2 * self._gap + 1, self.every - fewer)
        self._due = self._began + self._gap

    def _close(self) -> None:
        if self.is_open:
            cast_statistics.stop(self.name)
        self.is_open = False
