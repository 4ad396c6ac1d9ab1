"""The function of a part while it is being written."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8compile.kernels.codegen.source.statements import Statement


@dataclass
class FunctionDraft:
    """Statements in the places where they will stand, and the helpers that they call.

    before: once, before the walk over tiles. body: for each tile (where a program owns rows: for each row). tile: for
    each tile of a row that it owns, or for each tensor of a tile; where there are none of these, the same list as
    `body`. after: once, after the walk.
    """

    split: bool = False
    before: list[Statement] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tile: list[Statement] = [] if self.split else self.body

    def use(self, helper: str) -> None:
        """Have the function `helper` written into the kernel's file."""
        self.helpers[helper] = None

    @staticmethod
    def add_once(statements: list[Statement], statement: Statement) -> None:
        """Append a statement unless it stands there already."""
        if statement not in statements:
            statements.append(statement)
