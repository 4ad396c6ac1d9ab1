"""Private API of torch: every file that imports some has a row in the table of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fp8compile

ROOT = Path(fp8compile.__file__).parent.parent
ROOMS = ("fp8compile", "passes", "kernels")
PRIVATE = re.compile(r"torch(\.\w+)*\._\w+")
WIDELY_USED = {"torch.utils._pytree", "torch._dynamo"}  # as good as public: nested values; `register_backend`


def table() -> dict[str, str]:
    """The names in each row of the table, by file."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Private API of torch")[1]
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            names, files = line.split(" | ")[:2]
            for file in re.findall(r"`([^`]+\.py)`", files):
                full = file if "/" in file else next(f for f in files_of_rooms() if f.endswith(f"/{file}"))
                rows[full] = rows.get(full, "") + names
    return rows


def files_of_rooms() -> list[str]:
    """All source files, by their path in the tree."""
    found = [f.relative_to(ROOT).as_posix() for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    return sorted(f for f in found if not f.startswith(("fp8compile/passes/", "fp8compile/kernels/")))


def private_imports(file: str) -> list[str]:
    """The private modules of torch from which a file imports."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [m for m in modules if PRIVATE.match(m) and m not in WIDELY_USED]


def test_files_of_the_table_exist_and_use_what_it_names():
    for file, names in table().items():
        assert (ROOT / file).is_file(), file
        text = (ROOT / file).read_text()
        used = [n.split(".")[-1] for n in re.findall(r"`([^`]+)`", names) if "/" not in n]
        assert any(n in text for n in used), (file, used)


def test_private_imports_are_in_the_table():
    missing = {file: found for file in files_of_rooms() if (found := private_imports(file)) and file not in table()}
    assert missing == {}
