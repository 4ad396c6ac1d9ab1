"""Each room has a README of at most twenty lines: it names every file there, and what is never imported in it."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 20
TOPS = ("fp8compile", "passes", "kernels", "benchmarks", "examples")
NEVER = "Never imported here: "


def folders() -> Iterator[Path]:
    """Yield the folders that hold Python files; links lead to folders that are listed by themselves."""
    for top in TOPS:
        for folder, names, files in os.walk(ROOT / top):
            names[:] = sorted(name for name in names if not name.startswith((".", "__")))
            if any(name.endswith(".py") for name in files):
                yield Path(folder)


ROOMS = {str(folder.relative_to(ROOT)): folder for folder in folders()}


def readme(room: str) -> str:
    page = ROOMS[room] / "README.md"
    assert page.exists(), f"{room} has no README.md: what comes in, what goes out, its files, what it never imports"
    return page.read_text()


def imported(file: Path) -> set[str]:
    """Return what a file imports of this project, wherever in it, as paths: passes/core/walk."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    paths = {name.replace(".", "/") for name in found}
    return {re.sub(r"^fp8compile/(passes|kernels)/", r"\1/", path) for path in paths}


@pytest.mark.parametrize("room", ROOMS)
def test_a_readme_is_short(room: str) -> None:
    assert len(readme(room).splitlines()) <= LONGEST


@pytest.mark.parametrize("room", ROOMS)
def test_a_readme_names_the_files_of_its_room(room: str) -> None:
    named = set(re.findall(r"`(\w+\.py)`", readme(room)))  # files of other rooms are named with their folder
    there = {file.name for file in ROOMS[room].glob("*.py")} - {"__init__.py"}
    assert named == there, f"missing: {sorted(there - named)}; gone: {sorted(named - there)}"


@pytest.mark.parametrize("room", ROOMS)
def test_other_files_that_a_readme_names_exist(room: str) -> None:
    for path in re.findall(r"`([\w/]+/[\w.]*)`", readme(room).split(NEVER)[0]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("room", [room for room in ROOMS if room.startswith(("fp8compile", "passes", "kernels"))])
def test_a_room_imports_nothing_that_it_never_does(room: str) -> None:
    assert NEVER in readme(room), f"{room}/README.md: what does nobody import there?"
    never = re.findall(r"`([\w/]+)`", readme(room).split(NEVER)[1].split("\n\n")[0])
    assert never
    for path in never:
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path
    for file in ROOMS[room].glob("*.py"):
        for path in never:
            wrong = [name for name in imported(file) if name == path or name.startswith(f"{path}/")]
            assert not wrong, f"{room}/{file.name} imports {wrong}, which its README says is never imported there"


def test_the_readme_of_tests_names_its_folders() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    there = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/**/*.py")}
    assert set(re.findall(r"`(\w+)/`", text)) == there
    assert len(text.splitlines()) <= LONGEST


def test_a_stranger_finds_where_things_are_decided() -> None:
    """Three questions, answered by the paths that the READMEs name."""
    assert "q and k" in readme("passes/save")  # where is it decided that q is saved in BF16?
    assert "add an operator" in readme("passes/core").lower()  # how do I add an operator to fused regions?
    assert "stays BF16" in readme("passes/matmul")  # why did this matmul stay BF16?


def test_every_room_with_code_is_a_package_that_is_installed() -> None:
    """A room that pyproject.toml does not name is missing where the package is installed from a wheel."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = (room for room in ROOMS if room.startswith(("fp8compile", "passes", "kernels")))
    found = {room if room.startswith("fp8compile") else f"fp8compile/{room}" for room in rooms}
    found = {room.replace("/", ".") for room in found}
    assert len(named) == len(set(named))
    assert found - set(named) == set()
    assert set(named) - found <= {"fp8compile.kernels"}  # which has rooms alone
