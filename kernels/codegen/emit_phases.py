"""Tiles in several tensors: what is done with each stands in functions, one for each phase.

A phase is called for one tensor after the other. It returns what later phases need, and what is joined over all:

    p1_0 = reduce_tile1(0, p0_0[0])     acc7 = p1_0[0]
    p1_1 = reduce_tile1(1, p0_1[0])     acc7 = tl.maximum(acc7, p1_1[0])      v7 = tl.max(acc7, 1)
    p2_0 = store_tile2(0, v7, p0_0[0])  p2_1 = store_tile2(1, v7, p0_1[0])

Which tensors there are: columns of rows that are held (`kernels/codegen/emit_held.py`), every fourth row of a tile
(`kernels/codegen/emit_packed_transpose.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fp8compile.kernels.codegen.emit_values import Values

NAMES = re.compile(r"\b(?:[anvxy]\d+\w*|inverse\d+|rows\w*|cols\w*|row_block|col_block)\b")


@dataclass
class Phase:
    """What is done with each tensor; what is joined of it: `joins` says how of a<n>, `onto` whether acc<n> has
    something already; and what it returns, names or expressions."""

    lines: list[str]
    joins: dict[int, str]
    onto: bool = False
    returned: list[str] = field(default_factory=list)
    says: str = ""

    @property
    def defined(self) -> set[str]:
        """The names that it gives values to."""
        return {line.split(" = ")[0] for line in self.lines if " = " in line}

    def arguments(self, own: re.Pattern[str]) -> list[str]:
        """The names that it reads, and neither makes nor has as its `own`."""
        read = {name for line in [*self.lines, *self.returned] for name in NAMES.findall(line)} - self.defined
        return sorted(name for name in read if not own.fullmatch(name))

    def slot(self, name: str) -> int:
        """The place of `name` among what is returned."""
        if name not in self.returned:
            self.returned.append(name)
        return self.returned.index(name)


class Phases(Values):
    """Writes the phases of a part, if its tiles are several tensors.

    tensors: how many; number: what their number is called, "" if there are no phases; own: names that each phase has
    its own of; suffix: what tells the functions of this part from those of others.
    """

    tensors, number, own = 1, "", re.compile("")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.suffix = ""
        self.phases: list[Phase] = []
        self.joins: dict[int, str] = {}  # of the phase that is being written

    def _join(self, i: int, text: str, join: str) -> None:
        """Let acc<i> be what `join` makes of `text` of all tensors."""
        self.tile.append(f"a{i} = {text}")
        self.joins[i] = join

    def _end_phase(self, onto: bool = False) -> None:
        """What was written for each tensor becomes a function, called here for all of them."""
        if not self.number or not self.tile:
            return
        self.body.append(_mark(len(self.phases)))
        self.phases.append(Phase(list(self.tile), self.joins, onto))
        self.tile.clear()
        self.joins = {}
        self.axes = {axis for axis in self.axes if not self.own.fullmatch(axis)}

    def _finish_phases(self) -> list[str]:
        """The functions of all phases; their calls take their places."""
        last = len(self.phases) - 1
        named = [self._named(n, last) for n in range(last + 1)]
        calls = {_mark(n): self._calls(n, named) for n in reversed(range(last + 1))}  # the last say what they need
        self.body = [line for text in self.body for line in calls.get(text, [text])]
        return [self._function(phase, name + self.suffix) for phase, (name, _) in zip(self.phases, named, strict=True)]

    def _named(self, n: int, last: int) -> tuple[str, str]:
        """The names of phase `n` and, but for the tensor's number, of what it returns."""
        raise NotImplementedError

    def _calls(self, n: int, named: list[tuple[str, str]]) -> list[str]:
        phase, lines, (name, results) = self.phases[n], [], named[n]
        for tensor in range(self.tensors):
            passed = [self._passed(n, argument, tensor, named) for argument in phase.arguments(self.own)]
            returns = f"{results}{tensor} = " if phase.returned or phase.joins else ""
            lines.append(f"{returns}{name}{self.suffix}({', '.join([str(tensor), *passed])})")
            for i, join in phase.joins.items():
                found = f"{results}{tensor}[{phase.slot(f'a{i}')}]"
                lines.append(f"acc{i} = {join.format(f'acc{i}', found) if tensor or phase.onto else found}")
        return lines

    def _passed(self, n: int, name: str, tensor: int, named: list[tuple[str, str]]) -> str:
        """`name` of one tensor, from the phase that found it; what is the same for all as it is."""
        for earlier, phase in enumerate(self.phases[:n]):
            if name in phase.defined:
                return f"{named[earlier][1]}{tensor}[{phase.slot(name)}]"
        return name

    def _function(self, phase: Phase, name: str) -> str:
        lines = [f'"""{phase.says}"""', *phase.lines] if phase.says else list(phase.lines)
        if phase.returned:
            lines.append(f"return {', '.join(phase.returned)}{',' if len(phase.returned) == 1 else ''}")
        arguments = ", ".join([self.number, *phase.arguments(self.own)])
        return "\n".join(["@triton.jit", f"def {name}({arguments}):", *(f"    {line}" for line in lines)])


def _mark(phase: int) -> str:
    """Where the calls of a phase will stand."""
    return f"# phase {phase}"
