"""Every test starts from the same state: one thread, a fixed seed, nothing compiled, no history, no plan."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # generated kernels run on the CPU (tests/interpreter.py)

from fp8compile import delayed, plans


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
    plans.reset()
    delayed.reset()
