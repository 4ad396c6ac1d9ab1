"""The digest in the compile caches' keys: every file that compiles is in it, in whatever room it lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import fp8compile
from fp8compile.source_digest import READS_ONLY, source_digest, sources_of

PACKAGE = Path(fp8compile.__file__).parent


def walked(package: Path) -> set[str]:
    """Every Python file below the package, links followed: another way to the same list."""
    found = set()
    for folder, _, files in os.walk(package, followlinks=True):
        found |= {(Path(folder) / f).relative_to(package).as_posix() for f in files if f.endswith(".py")}
    return found


def test_every_file_that_compiles_is_in_the_digest():
    names = set(sources_of(PACKAGE))
    assert names == {name for name in walked(PACKAGE) if not name.startswith(f"{READS_ONLY}/")}
    rooms = {Path(name).parent.as_posix() for name in names}
    assert {".", "plan", "torch_hooks", "passes", "passes/save", "optimizer"} <= rooms
    assert {"kernels/codegen", "kernels/codegen/spec", "kernels/codegen/emit"} <= rooms
    assert len(names) > 150


@pytest.fixture
def copied(tmp_path, monkeypatch):
    package = tmp_path / "fp8compile"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("fp8compile.source_digest.HERE", package)
    return package


def digest() -> str:
    return source_digest.__wrapped__()


@pytest.mark.parametrize(
    "room", ["", "plan/", "passes/", "passes/save/", "kernels/codegen/", "kernels/codegen/spec/", "optimizer/"]
)
def test_a_change_in_any_room_makes_another_digest(copied, room):
    before = digest()
    file = next(iter(sorted((copied / room).glob("*.py"))))
    file.write_text(file.read_text() + "\n# changed\n")
    changed = digest()
    assert changed != before
    file.rename(file.with_name("renamed_" + file.name))
    assert digest() not in (before, changed)


def test_what_only_looks_changes_nothing(copied):
    before = digest()
    (copied / "insight" / "tables" / "another.py").write_text("x = 1\n")
    assert digest() == before
