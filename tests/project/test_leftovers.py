"""What runs leave behind in a clone changes nothing that `make test` says of it.

Tests work on a copy of the tree into which is put what training, packaging, dumps and trainers leave: folders with the
names of modules here, and Python that nobody wrote.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ("fp8compile", "passes", "kernels", "tests", "examples", "benchmarks", "pyproject.toml", "README.md", "LICENSE")
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "runs", "results")
UGLY = "import sys,os\nfrom torch import *\nx:int='a'\ndef f( a ):\n  return undefined\n"  # no rule lets this pass
FILES = {
    "training": ["runs/train_lm/results.json", "runs/train_lm/loss.png", "examples/runs/train_lm/results.json"],
    "package": ["build/lib/fp8compile/backend.py", "dist/fp8compile-0.1.0.tar.gz", "fp8compile.egg-info/PKG-INFO"],
    "environment": [".venv/lib/python3.11/site-packages/numbers.py", "venv/lib/python3.11/site-packages/runs.py"],
    "dump": ["folder/graph0/01_forward.py", "folder/kernels/tiles_amax.py", "plan.json", "FP8_dump/graph0/a.py"],
    "reports": ["fp8compile-a1b2c3/report.txt", "torchinductor_me/ab/cabc.py", "report.html"],
    "trainers": ["trainer_output/checkpoint-1/state.pt", "lightning_logs/version_0/hparams.yaml", "outputs/runs/x.py"],
    "caches": [".pytest_cache/README.md", ".ruff_cache/x", "__pycache__/runs.cpython-311.pyc"],
    "names": [
        f"{file.stem}/left.txt" for room in ("tests", "examples", "benchmarks") for file in (ROOT / room).rglob("*.py")
    ],
}


def leave(tree: Path, files: list[str]) -> None:
    """Make each of the `files`; what is Python breaks every rule of lint and types."""
    for name in files:
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(UGLY if file.suffix == ".py" else "left behind")


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], cwd=tree, capture_output=True, text=True, check=False)


def tool(name: str) -> str:
    """The program of that name beside this Python."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        pytest.skip(f"{name} is not installed here: pip install -e '.[dev]'")
    return str(beside)


def copied(folder: Path) -> Path:
    """A copy of what is in the repository."""
    for name in KEPT:
        source, copy = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=LEFT_OUT)
        else:
            shutil.copy(source, copy)
    return folder


def linted(tree: Path) -> list[str]:
    commands = (("check", "--no-cache", "."), ("format", "--no-cache", "--check", "."))
    return [run(tree, tool("ruff"), *command).stdout for command in commands]


@pytest.fixture(scope="module")
def littered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy in which everything is left behind, and what lint said of it before."""
    tree = copied(tmp_path_factory.mktemp("littered"))
    before = linted(tree)
    for files in FILES.values():
        leave(tree, files)
    return tree, before


def test_lint_says_the_same_with_leftovers(littered: tuple[Path, list[str]]):
    tree, before = littered
    assert linted(tree) == before


def test_lint_still_finds_what_is_wrong_in_every_folder_with_code(tmp_path: Path):
    tree = copied(tmp_path)
    places = [f"{room}/wrong.py" for room in ("fp8compile", "passes", "kernels", "tests", "examples", "benchmarks")]
    leave(tree, [*places, "fp8compile/insight/wrong.py", "tests/passes/wrong.py"])
    found = run(tree, tool("ruff"), "check", "--no-cache", "--output-format", "concise", ".").stdout
    for place in (*places, "fp8compile/insight/wrong.py", "tests/passes/wrong.py"):
        assert f"{place}:" in found


OURS = ("fp8compile", "benchmarks", "docs", "tests")


def test_lint_knows_the_examples_by_name():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    examples = sorted(file.stem for file in (ROOT / "examples").glob("*.py"))
    known = settings["lint"]["isort"]["known-first-party"]
    assert known == [*OURS, *examples], "name each example, sorted"
    assert settings["src"] == [], "a folder that is searched for modules makes what lies in it a module"


def test_types_are_the_same_with_leftovers(littered: tuple[Path, list[str]]):
    tree, _ = littered
    files = [
        "tests/benchmarks/test_runs.py",
        "examples/train_lm.py",
        "benchmarks/training/convergence.py",
    ]
    command = (tool("pyright"), "--pythonpath", sys.executable, *files)
    assert run(tree, *command).stdout.startswith("0 errors")  # as `make lint` has it without them


def test_tests_are_the_same_with_leftovers(littered: tuple[Path, list[str]]):
    tree, _ = littered
    collect = (sys.executable, "-m", "pytest", "--collect-only", "--all-cases", "-q", "-p", "no:cacheprovider", "-n0")
    files = ("tests/benchmarks/test_runs.py", "tests/benchmarks/test_tables.py")
    there = run(tree, *collect, *files)
    here = {f"{file}::{name}" for file in files for name in TEST.findall((ROOT / file).read_text())}
    assert len(here) > 10
    assert {line.split("[")[0] for line in there.stdout.splitlines() if "::" in line} == here, there
