"""The imports between modules and between rooms, and docs/imports.md, which shows them.

    python docs/imports.py        # writes docs/imports.md

An import counts wherever it stands: at the top of a file, within a function, or for types only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "imports.md"
TREES = {
    "fp8compile": ROOT / "fp8compile",
    "fp8compile.passes": ROOT / "passes",
    "fp8compile.kernels": ROOT / "kernels",
}
FRONT_DOOR = ("__main__", "backend", "compile_graph", "registration")
OPTIONS = ("levels", "option_values", "options")
OPERATORS = ("delayed", "ops")
# from the top down: what stands higher may import what stands lower
ROOMS = (
    "front door", "insight", "cuda_graphs", "serving", "adaptive", "optimizer", "distributed", "torch_hooks", "passes",
    "passes.optimizer", "passes.collectives", "passes.loss", "passes.attention", "passes.lower", "passes.regions",
    "passes.save", "passes.canonical", "passes.matmul", "passes.core", "plan", "options", "operators", "kernels.check",
    "kernels.optimizer",
    "kernels.loss", "kernels.casts", "kernels.matmul", "kernels.codegen", "kernels.codegen.emit", "kernels.reference",
    "kernels.codegen.schedule", "kernels.codegen.spec", "kernels.codegen.source", "basics",
)  # fmt: skip
HEAD = """# Which room imports which

Made by `python docs/imports.py`. Imports count wherever they stand: in functions and for types too. A test finds
every circle of modules, and every import that runs up without a reason in its table
(`tests/project/test_imports.py`).

`front door` is `__init__`, `__main__`, `backend`, `compile_graph` and `registration`; `options` is `options`,
`option_values` and `levels`; `operators` is `ops` and `delayed`; `basics` is every other file that lies in
`fp8compile/` itself.

"""
MATRIX = """
A row imports the columns that have its mark. What is right of the diagonal runs down; what is left of it (`o`) runs up.

"""


def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by its dotted name."""
    found = {}
    for prefix, folder in TREES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            if prefix != "fp8compile" or parts[0] not in ("passes", "kernels"):
                found[".".join((prefix, *parts)).removesuffix(".__init__")] = file
    return found


def imports() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports."""
    known = modules()
    return {name: set(_imported(name, file, known)) for name, file in known.items()}


def _imported(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            wanted = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in wanted:
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


def room_of(module: str) -> str:
    """Return the room of a module: "plan", "passes.matmul", "kernels.codegen.spec", or a group of the files in
    fp8compile/ itself."""
    parts = module.split(".")[1:]
    if parts and parts[0] in ("passes", "kernels"):
        return ".".join(parts[:-1] or parts)
    if len(parts) > 1 or (parts and (ROOT / "fp8compile" / parts[0]).is_dir()):
        return parts[0]
    for room, files in (("front door", FRONT_DOOR), ("options", OPTIONS), ("operators", OPERATORS)):
        if not parts or parts[0] in files:
            return room
    return "basics"


def room_imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, targets in imports().items():
        found.setdefault(room_of(module), set()).update(map(room_of, targets))
    return {room: targets - {room} for room, targets in found.items()}


def page() -> str:
    """Return the text of docs/imports.md."""
    return HEAD + _picture() + MATRIX + _matrix()


def _picture() -> str:
    """Return a Mermaid graph of the rooms, those of passes and of kernels as one; arrows that others imply left out."""
    arrows = {(_group(a), _group(b)) for a, targets in room_imports().items() for b in targets}
    order = [room for room in dict.fromkeys(map(_group, ROOMS)) if room != "basics"]
    down = {(a, b) for a, b in arrows if a in order and b in order and order.index(a) < order.index(b)}
    shown = [(a, b) for a, b in sorted(down) if not any((a, x) in down and (x, b) in down for x in order)]
    lines = [f"    {_key(a)}[{a}] --> {_key(b)}[{b}]" for a, b in shown]
    return "```mermaid\ngraph TD\n" + "\n".join(lines) + "\n```\n"


def _group(room: str) -> str:
    return room.split(".")[0]


def _key(room: str) -> str:
    return room.replace(" ", "_")


def _matrix() -> str:
    arrows = room_imports()
    width = max(map(len, ROOMS))
    heads = [f"{i:>2}" for i in range(1, len(ROOMS) + 1)]
    lines = [f"{'':{width + 3}} {' '.join(heads)}"]
    for i, room in enumerate(ROOMS):
        cells = ["\\" if i == j else _mark(other in arrows[room], j > i) for j, other in enumerate(ROOMS)]
        lines.append(f"{i + 1:>2} {room:<{width}}  {'  '.join(cells)}".rstrip())
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _mark(imported: bool, down: bool) -> str:
    return ("x" if down else "o") if imported else " "


if __name__ == "__main__":
    PAGE.write_text(page())
