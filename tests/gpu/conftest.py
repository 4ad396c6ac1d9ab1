"""GPU tests: one command runs them all (`make test-gpu`); without a GPU with FP8 they are skipped, visibly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from poison import poison_free_memory


def _has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(autouse=True)
def stale_memory() -> Iterator[None]:
    """Let each test find NaN in memory that it has not written. Workers of `-n` share the GPUs, and keep no memory."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if _has_fp8():
        if worker is not None:
            torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())
        poison_free_memory()
    yield
    if worker is not None and _has_fp8():
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _has_fp8():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU with FP8 matmul units"))
