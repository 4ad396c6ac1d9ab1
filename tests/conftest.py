"""Every test starts from the same state: one thread, a fixed seed, nothing compiled, no history, no plan; and memory
that nobody has written is NaN.

Longer cases whose code others run too are left out, unless they are named or asked for (tests/cases.py).

Each process of a run has an empty compile cache of its own, so that no test finds what an earlier run has compiled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from poison import poison
from quick import quicken

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # generated kernels run on the CPU (tests/support/interpreter.py)

_cache = tempfile.TemporaryDirectory(prefix="fp8compile-tests-")  # lives as long as the process
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what a test starts does not compile programs to see so

from fp8compile import process_state  # noqa: E402
from tests import cases  # noqa: E402

quicken()
poison()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves nothing out, and the one that gives each rank a GPU."""
    parser.addoption("--all-cases", action="store_true", help="run those of tests/left_out.json too")
    parser.addoption("--on-gpus", action="store_true", help="run tests/distributed over NCCL, a GPU for each rank")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what tests/left_out.json names, where whole files run."""
    if config.getoption("--all-cases") or config.option.keyword or any("::" in argument for argument in config.args):
        return
    known = {test: frozenset(parameters) for test, parameters in cases.left_out().items()}
    left = [item for item in items if cases.is_left_out(item.nodeid, known)]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seed, and forget what an earlier test compiled (before and after)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    process_state.reset()
    yield
    process_state.reset()
