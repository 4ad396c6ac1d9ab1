"""Every test starts from the same state: one thread, a fixed seed, nothing compiled, no history, no plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fp8compile


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
    fp8compile.plans.reset()
    fp8compile.delayed.reset()
