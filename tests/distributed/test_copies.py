"""Processes of ranks on CPUs are copies of one that can be copied, and that has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks import HAS_COMPILED, printed_by
from torch._dynamo import utils


def origin() -> None:
    """Print how many threads the copied process has, and whether it has compiled."""
    threads = list(Path(f"/proc/{os.getppid()}/task").iterdir())
    print(len(threads), len(utils.get_compilation_metrics()) > 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what has used a GPU cannot be copied")
def test_what_is_copied_has_one_thread_and_has_compiled() -> None:
    assert printed_by(origin).split() == ["1", str(HAS_COMPILED)]
