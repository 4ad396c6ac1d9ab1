"""GPU tests: one command runs them all (`make test-gpu`); without a GPU with FP8 they are skipped, visibly."""

from __future__ import annotations

import pytest
import torch
from poison import poison_free_memory


def _has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(autouse=True)
def stale_memory() -> None:
    """Let each test find NaN in memory that it has not written."""
    if _has_fp8():
        poison_free_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _has_fp8():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU with FP8 matmul units"))
