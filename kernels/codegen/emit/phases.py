"""Tiles in several tensors: what is done with each stands in functions, one for each phase.

A phase is called for one tensor after the other. It returns what later phases need, and what is joined over all:

    p1_0 = reduce_tile1(0, p0_0[0])     acc7 = p1_0[0]
    p1_1 = reduce_tile1(1, p0_1[0])     acc7 = tl.maximum(acc7, p1_1[0])      v7 = tl.max(acc7, 1)
    p2_0 = store_tile2(0, v7, p0_0[0])  p2_1 = store_tile2(1, v7, p0_1[0])

Which tensors there are: columns of rows that are held (`kernels/codegen/emit/held_rows.py`), every fourth row of a tile
(`kernels/codegen/emit/packed_transpose.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fp8compile.kernels.codegen.emit.indices import Indices
from fp8compile.kernels.codegen.source.function_draft import FunctionDraft
from fp8compile.kernels.codegen.source.statements import (
    Apply,
    Assign,
    Call,
    Expression,
    Function,
    Name,
    Return,
    Statement,
    expr,
    names_assigned,
    names_in,
    names_read,
)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a tile.

    count: how many; number: the variable that says which one it is; is_own: True for variables of which each phase
    makes its own; named(n, last): the names of phase n of 0 to `last` and, but for the tensor's number, of its results.
    """

    count: int
    number: Name
    is_own: Callable[[Name], bool]
    named: Callable[[int, int], tuple[str, str]]


@dataclass
class Phase:
    """The work on each tensor of a tile.

    joins: how a<n> of all tensors become acc<n>; onto: True if acc<n> has something already; returned: results.
    """

    statements: list[Statement]
    joins: dict[int, str]
    onto: bool = False
    returned: list[Expression] = field(default_factory=list)
    doc: str = ""

    @property
    def defined(self) -> set[Name]:
        """The variables to which it gives values."""
        return names_assigned(self.statements)

    def arguments(self, is_own: Callable[[Name], bool]) -> list[Name]:
        """Return the variables that it reads, and neither makes nor has as its own."""
        read = names_read(self.statements) | {name for x in self.returned for name in names_in(x)}
        return sorted((n for n in read - self.defined if not is_own(n)), key=lambda name: name.text)

    def slot(self, name: Name) -> int:
        """Return the place of `name` among what is returned, where it is put if it is not there yet."""
        if name not in self.returned:
            self.returned.append(name)
        return self.returned.index(name)


class Phases:
    """Collects the phases of a part; has none if its tiles are one tensor each."""

    def __init__(self, draft: FunctionDraft, indices: Indices, tensors: Tensors | None) -> None:
        self.draft, self.indices, self.tensors = draft, indices, tensors
        self.phases: list[Phase] = []
        self.joins: dict[int, str] = {}  # of the phase that is being written
        self.marks: dict[Call, int] = {}  # what stands for the calls of a phase -> its number

    def join(self, i: int, x: Expression, join: str) -> None:
        """Let acc<i> be what `join` makes of `x` of all tensors."""
        self.draft.tile.append(Assign(Name(f"a{i}"), x))
        self.joins[i] = join

    def end(self, onto: bool = False) -> None:
        """Make a function of what was written for each tensor. It is called here, for all of them."""
        if self.tensors is None or not self.draft.tile:
            return
        mark = Call(Apply(f"phase {len(self.phases)}"))
        self.marks[mark] = len(self.phases)
        self.draft.body.append(mark)
        self.phases.append(Phase(list(self.draft.tile), self.joins, onto))
        self.draft.tile.clear()
        self.joins = {}
        self.indices.written = {name for name in self.indices.written if not self.tensors.is_own(name)}

    def finish(self, suffix: str) -> list[Function]:
        """Return the functions of all phases, named with `suffix`, and put their calls into their places."""
        if self.tensors is None:
            return []
        last = len(self.phases) - 1
        named = [self.tensors.named(n, last) for n in range(last + 1)]
        named = [(name + suffix, results) for name, results in named]
        calls = {n: self._calls(n, named) for n in reversed(range(last + 1))}  # the last say what they need
        body: list[Statement] = []
        for statement in self.draft.body:
            phase = self.marks.get(statement) if isinstance(statement, Call) else None
            body += [statement] if phase is None else calls[phase]
        self.draft.body[:] = body
        return [self._function(phase, name) for phase, (name, _) in zip(self.phases, named, strict=True)]

    def _calls(self, n: int, named: list[tuple[str, str]]) -> list[Statement]:
        assert self.tensors is not None
        phase, (name, results) = self.phases[n], named[n]
        statements: list[Statement] = []
        for tensor in range(self.tensors.count):
            passed = [self._passed(n, a, tensor, named) for a in phase.arguments(self.tensors.is_own)]
            call = expr(f"{name}({', '.join('{}' for _ in (tensor, *passed))})", tensor, *passed)
            result = Name(f"{results}{tensor}")
            statements.append(Assign(result, call) if phase.returned or phase.joins else Call(call))
            for i, join in phase.joins.items():
                total, found = Name(f"acc{i}"), expr(f"{{}}[{phase.slot(Name(f'a{i}'))}]", result)
                statements.append(Assign(total, expr(join, total, found) if tensor or phase.onto else found))
        return statements

    def _passed(self, n: int, name: Name, tensor: int, named: list[tuple[str, str]]) -> Expression:
        """Return `name` of one tensor, from the phase that found it; what is the same for all as it is."""
        for earlier, phase in enumerate(self.phases[:n]):
            if name in phase.defined:
                return expr(f"{{}}[{phase.slot(name)}]", Name(f"{named[earlier][1]}{tensor}"))
        return name

    def _function(self, phase: Phase, name: str) -> Function:
        assert self.tensors is not None
        arguments = (self.tensors.number, *phase.arguments(self.tensors.is_own))
        returned = (Return(tuple(phase.returned)),) if phase.returned else ()
        return Function(name, arguments, (*phase.statements, *returned), phase.doc)
