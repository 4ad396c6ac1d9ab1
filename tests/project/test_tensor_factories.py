"""New tensors of ours have the dtype and the device that we name: a user's default dtype and device are the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fp8compile

ROOT = Path(fp8compile.__file__).parent.parent
ROOMS = ("fp8compile", "passes", "kernels")
FACTORIES = {f"torch.{name}" for name in (
    "arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)}  # fmt: skip
OF_INTEGERS = {"torch.arange", "torch.randint", "torch.randperm"}  # integers whatever the default is


def unnamed(node: ast.AST, placed: bool = False) -> Iterator[tuple[int, str]]:
    """The line of each factory of torch that leaves its dtype or its device open, and which."""
    if isinstance(node, ast.With):
        placed = placed or any(ast.unparse(item.context_expr).startswith("torch.device") for item in node.items)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
        given = {keyword.arg for keyword in node.keywords}
        if not given & {"dtype", None} and ast.unparse(node.func) not in OF_INTEGERS:
            yield node.lineno, "dtype"
        if not placed and not given & {"device", None}:
            yield node.lineno, "device"
    for child in ast.iter_child_nodes(node):
        yield from unnamed(child, placed)


def test_factories_name_dtype_and_device() -> None:
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    found = {f.relative_to(ROOT).as_posix(): list(unnamed(ast.parse(f.read_text()))) for f in files}
    assert list(unnamed(ast.parse("torch.zeros(3)"))) == [(1, "dtype"), (1, "device")]
    assert not [f"{name}:{line} ({what})" for name, places in found.items() for line, what in places]
