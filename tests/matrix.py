"""The CPU tests under each version of torch, each in an environment of its own, and a table of what was seen.

    make test-matrix                                            all versions but the default one, one after the other
    make test-matrix ARGS="--torch 2.15 -- tests/optimizer"     one version; what follows -- is pytest's

Environments are called .venv-torch-2.15 and are kept: only what is missing is installed. Triton is what that torch asks
for, else the newest. Each run's log and results are in runs/matrix/. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.11", "2.12", "2.14", "2.15")  # `make test` runs 2.13
SEEN = ("torch", "triton", "transformers")  # packages whose versions the table shows
LOGS = ROOT / "runs" / "matrix"


@dataclass(frozen=True)
class Row:
    """One line of the table: an environment, by package, and what its tests came to."""

    versions: dict[str, str]
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    minutes: float = 0.0


def results(file: Path, versions: dict[str, str]) -> Row:
    """Read a row from the XML that pytest wrote; without one, the run itself has failed."""
    if not file.exists():
        return Row(versions, failed=("the run itself",))
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in failed)
    seconds = sum(float(suite.get("time", 0)) for suite in ElementTree.parse(file).getroot().iter("testsuite"))
    return Row(versions, len(cases) - skipped - len(failed), skipped, names, seconds / 60)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown, and under it the tests that failed."""
    lines = [
        f"| {' | '.join(SEEN)} | Python | passed | skipped | failed | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        known = [row.versions.get(name, "–") for name in (*SEEN, "python")]
        numbers = [str(row.passed), str(row.skipped), str(len(row.failed)), f"{row.minutes:.0f}"]
        lines.append(f"| {' | '.join(known + numbers)} |")
    failures = [f"{row.versions.get('torch', '–')}: {name}" for row in rows for name in row.failed]
    return "\n".join([*lines, *([""] if failures else []), *failures])


def environment(version: str) -> Path:
    """Return the Python of the environment for one version of torch, installed as far as it is not."""
    folder = ROOT / f".venv-torch-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = ["--editable", f"{ROOT}[dev]", f"torch=={version}.*"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def versions_in(python: Path) -> dict[str, str]:
    """Return the versions that an environment has of the packages that the table shows, and of Python."""
    shown = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    found = {name: version for name, version in re.findall(r"^(\S+) +(\S+)", shown, re.MULTILINE) if name in SEEN}
    asked = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    return {**found, "python": asked.split()[-1]}


def run(version: str, arguments: Sequence[str]) -> Row:
    """Run the tests under one version of torch."""
    python = environment(version)
    log, report = LOGS / f"torch-{version}.txt", LOGS / f"torch-{version}.xml"
    log.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "--all-cases",
        f"--junitxml={report}",
        *arguments,
    ]
    with log.open("w") as out:
        subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=out, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return results(report, versions_in(python))


def main(given: Sequence[str]) -> int:
    """Run the versions that were asked for, and print the table."""
    at = given.index("--") if "--" in given else len(given)
    ours, pytests = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description="The CPU tests under each version of torch."
    )
    parser.add_argument("--torch", nargs="+", default=VERSIONS, help="versions, such as 2.15")
    rows = []
    for version in parser.parse_args(ours).torch:
        rows.append(run(version, pytests))
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
