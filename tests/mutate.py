"""Break the code in one place at a time, and see that a test goes red: `python -m tests.mutate [--only passes/save]`.

tests/mutations.toml is the list. Each mutation is made in a copy of the checkout, and its tests run there; one that no
test notices is printed, and makes the command fail. Run it when tests are dropped or made smaller.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutations.toml")
COPIED = ("fp8compile", "passes", "kernels", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md")
SECONDS = 900.0  # that the tests of one mutation may take
FAILED = 1  # pytest's exit code where tests failed, rather than could not be run


@dataclass(frozen=True)
class Mutation:
    """A change that makes the code wrong. old: text that the file has once; tests: what must fail, as in a shell."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def names(self) -> list[str]:
        """The files, tests and cases of which one must fail."""
        return shlex.split(self.tests)

    def apply(self, root: Path) -> None:
        """Write the change into the checkout at `root`. Raises ValueError where `old` is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new))


def mutations() -> list[Mutation]:
    """Return the list."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text())["mutation"]]


def survives(mutation: Mutation) -> str:
    """Return "" where the mutation's tests fail, else what they said."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy(Path(folder))
        mutation.apply(Path(folder))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.names]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no result within {SECONDS:.0f} s"
    return "" if done.returncode == FAILED else "\n".join(done.stdout.splitlines()[-3:])


def copy(to: Path) -> None:
    """Copy the checkout, links as links."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations asked for; returns how many no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations of files whose path has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time")
    given = parser.parse_args(arguments)
    chosen = [m for m in mutations() if given.only in m.file]
    survivors = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutation, said in zip(chosen, pool.map(survives, chosen), strict=True):
            survivors += bool(said)
            print(f"{'NOT NOTICED' if said else 'noticed'}: {mutation.file}: {mutation.new!r}", said, flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations noticed")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(), 1))
