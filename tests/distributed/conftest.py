"""Two processes for each test file that wants them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group."""
    started = Ranks()
    yield started
    started.close()
