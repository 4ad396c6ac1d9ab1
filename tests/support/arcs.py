"""A plugin of pytest that notes what each test runs: `pytest -p arcs --arcs FOLDER` (tests/cases.py reads it).

Every process writes a file: the branches that it met, and of each test its seconds and the numbers of its branches. A
branch is a file of the package, the line it leaves and the line it goes to. Other processes that a test starts are not
seen. `pip install coverage`.
"""

from __future__ import annotations

import array
import os
import pickle
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("fp8compile", "passes", "kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says where to."""
    parser.addoption("--arcs", help="the folder for what each test runs")


def pytest_configure(config: pytest.Config) -> None:
    """Note what the tests of this process run."""
    if folder := config.getoption("--arcs"):
        config.pluginmanager.register(Arcs(Path(folder)), "arcs of each test")


class Arcs:
    """What the tests of this process have run."""

    def __init__(self, folder: Path):
        self.folder = folder
        here = [str(ROOT / room / "*") for room in ROOMS]
        self.coverage: Any = import_module("coverage").Coverage(
            data_file=None, branch=True, include=here, config_file=False
        )
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.tests: dict[str, tuple[float, array.array[int]]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note one test, with what is set up for it and torn down."""
        self.coverage.erase()
        self.coverage.start()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.coverage.stop()
        self.tests[item.nodeid] = seconds, array.array("i", self._met())

    def _met(self) -> Iterator[int]:
        data = self.coverage.get_data()
        for file in data.measured_files():
            name = str(Path(file).relative_to(ROOT))
            for leaves, goes_to in data.arcs(file) or ():
                yield self.numbers.setdefault((name, leaves, goes_to), len(self.numbers))

    def pytest_sessionfinish(self) -> None:
        """Write the file of this process."""
        if self.tests:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{os.getpid()}.pickle").write_bytes(pickle.dumps((self.numbers, self.tests)))
