"""Rows held in several tiles: a program loads all tiles of its rows, and has them until it stores.

A tile is a power of two wide. A row of 14336 takes 16384 columns in one tile, and none too many in seven of 2048. What
is done with a tile stands in a function for each phase, which is called for one tile after the other:

    load      p0_0 = load_tile(0, …)          p0_1 = load_tile(1, …)
    reduce    p1_0 = reduce_tile1(0, p0_0[0])     acc7 = p1_0[0]
              p1_1 = reduce_tile1(1, p0_1[0])     acc7 = tl.maximum(acc7, p1_1[0])      v7 = tl.max(acc7, 1)
    store     p2_0 = store_tile(0, v7, p0_0[0])   p2_1 = store_tile(1, v7, p0_1[0])
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fp8compile.kernels.emit_quarters import Quarters
from fp8compile.kernels.spec import ROW_REDUCTIONS

NAMES = re.compile(r"\b(?:[anvxy]\d+\w*|inverse\d+|rows\w*|cols\w*|row_block|col_block)\b")
OF_A_PHASE = re.compile(r"cols\w*|col_block")  # names that each phase has its own of


@dataclass
class Phase:
    """What is done with each tile; the names of what it finds that is used outside; which of that is joined, and how:
    `joins` says it of a<n>, `onto` whether acc<n> has something already."""

    lines: list[str]
    joins: dict[int, str]
    onto: bool
    returned: list[str] = field(default_factory=list)

    @property
    def defined(self) -> set[str]:
        """The names that it gives values to."""
        return {line.split(" = ")[0] for line in self.lines if " = " in line}

    @property
    def arguments(self) -> list[str]:
        """The names that it reads, and does not make."""
        read = {name for line in self.lines for name in NAMES.findall(line)} - self.defined
        return sorted(name for name in read if not OF_A_PHASE.fullmatch(name))

    def slot(self, name: str) -> int:
        """The place of `name` among what is returned."""
        if name not in self.returned:
            self.returned.append(name)
        return self.returned.index(name)


class Held(Quarters):
    """Writes what is done with the tiles of rows that are held, if the tiling says so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases: list[Phase] = []
        self.joins: dict[int, str] = {}  # of the phase that is being written

    def _hold(self, needed: set[int]) -> None:
        """The phases that load and reduce the values `needed` for what is stored."""
        values = self.part.values
        for i in sorted(needed):
            if values[i].op == "load" and self.part.extents[i][1]:
                self._value(i)
        self._end_phase()
        for level in range(1, max(self.levels, default=0) + 1):
            totals = {}
            for i in sorted(needed):
                if values[i].op in ROW_REDUCTIONS and self.levels[i] == level:
                    text, _, join, totals[i] = self._reduction(values[i])
                    self._join(i, text, join)
            self._end_phase()
            for i, total in totals.items():
                self.body.append(f"v{i} = {total.format(f'acc{i}')}")
                self.done.add(i)

    def _join(self, i: int, text: str, join: str) -> None:
        """Let acc<i> be what `join` makes of `text` of all tiles."""
        self.tile.append(f"a{i} = {text}")
        self.joins[i] = join

    def _end_phase(self, onto: bool = False) -> None:
        """What was written for each tile becomes a function, called here for all of them."""
        if not self.tile or not self.tiling.held:
            return
        self.body.append(_mark(len(self.phases)))
        self.phases.append(Phase(list(self.tile), self.joins, onto))
        self.tile.clear()
        self.joins = {}
        self.axes = {axis for axis in self.axes if not axis.startswith("cols")}

    def _finish_phases(self, part: str) -> list[str]:
        """The functions of all phases; their calls take their places."""
        last = len(self.phases) - 1
        does = ["load", *("reduce" for _ in range(last - 1)), "store"]
        names = [f"{does[n]}_tile{n or ''}{part}" for n in range(last + 1)]
        calls = {_mark(n): self._calls(n, names[n]) for n in reversed(range(last + 1))}  # the last say what they need
        self.body = [line for text in self.body for line in calls.get(text, [text])]
        return [_function(phase, name) for phase, name in zip(self.phases, names, strict=True)]

    def _calls(self, n: int, name: str) -> list[str]:
        phase, lines = self.phases[n], []
        for tile in range(self.tiling.col_blocks):
            passed = [str(tile), *(self._passed(n, argument, tile) for argument in phase.arguments)]
            returns = phase.returned or phase.joins
            lines.append(f"{f'p{n}_{tile} = ' if returns else ''}{name}({', '.join(passed)})")
            for i, join in phase.joins.items():
                found = f"p{n}_{tile}[{phase.slot(f'a{i}')}]"
                lines.append(f"acc{i} = {join.format(f'acc{i}', found) if tile or phase.onto else found}")
        return lines

    def _passed(self, n: int, name: str, tile: int) -> str:
        """`name` of one tile, from the phase that found it; what is the same for all tiles as it is."""
        for earlier, phase in enumerate(self.phases[:n]):
            if name in phase.defined:
                return f"p{earlier}_{tile}[{phase.slot(name)}]"
        return name


def _function(phase: Phase, name: str) -> str:
    lines = list(phase.lines)
    if phase.returned:
        lines.append(f"return {', '.join(phase.returned)}{',' if len(phase.returned) == 1 else ''}")
    arguments = ", ".join(["col_block", *phase.arguments])
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *(f"    {line}" for line in lines)])


def _mark(phase: int) -> str:
    """Where the calls of a phase will stand."""
    return f"# phase {phase}"
