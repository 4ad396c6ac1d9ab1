"""Triton launches on the current device: each launch of ours is made within that of its tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fp8compile

ROOT = Path(fp8compile.__file__).parent.parent
ROOMS = ("fp8compile", "passes", "kernels")
GUARD = "torch.cuda.device_of"


def launches(node: ast.AST, guarded: bool = False) -> Iterator[tuple[int, bool]]:
    """The line of each call of something with an index, `kernel[grid](…)`, and whether it is guarded."""
    if isinstance(node, ast.With):
        guarded = guarded or any(ast.unparse(item.context_expr).startswith(GUARD) for item in node.items)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "kernel" in ast.unparse(node.func.value):
        yield node.lineno, guarded
    for child in ast.iter_child_nodes(node):
        yield from launches(child, guarded)


def test_launches_are_made_on_the_device_of_their_tensors() -> None:
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    found = {f.relative_to(ROOT).as_posix(): list(launches(ast.parse(f.read_text()))) for f in files}
    assert sum(map(len, found.values())) >= 8
    assert not [f"{name}:{line}" for name, lines in found.items() for line, guarded in lines if not guarded]
