"""Every test starts from the same state: one thread, a fixed seed, nothing compiled, no history, no plan; and memory
that nobody has written is NaN.

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

from fp8compile import delayed  # noqa: E402
from fp8compile.adaptive import adaptive_graph  # noqa: E402
from fp8compile.plan import store  # noqa: E402

quicken()
poison()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seed, and forget what an earlier test compiled (before and after)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _forget()
    yield
    _forget()


def _forget() -> None:
    torch.compiler.reset()  # Dynamo's code, Inductor's state
    store.reset()
    delayed.reset()
    adaptive_graph.reset()
