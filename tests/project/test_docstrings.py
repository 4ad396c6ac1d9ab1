"""The first line of a function's docstring says what is done or returned, with a verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("fp8compile", "passes", "kernels", "benchmarks", "examples")
RIDDLES = {"What", "Whether", "Why", "How", "Which", "Where", "The", "A", "An", "Those", "These", "This", "Each", "All"}
NAMED_AFTER_VALUES = ("property", "cached_property")  # what reads like an attribute is called as one


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module that are called as such."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
            if not any(name in NAMED_AFTER_VALUES for name in names):
                yield node


def riddles(source: str) -> list[str]:
    """Return the names of functions whose docstring begins with no verb."""
    found = ((node.name, ast.get_docstring(node)) for node in functions(source))
    return [name for name, text in found if text and text.split()[0] in RIDDLES]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb(room: str) -> None:
    files = [file for file in (ROOT / room).rglob("*.py") if "runs" not in file.relative_to(ROOT).parts]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): names for file in files if (names := riddles(file.read_text()))}
    assert not found


def test_a_riddle_is_seen() -> None:
    assert riddles('def f():\n    """What pays."""\n') == ["f"]
    assert riddles('def f():\n    """Return what pays."""\n@property\ndef g(self):\n    """The rows."""\n') == []
