"""Two processes for all tests that want them: the first test of a process takes seconds more than the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def pairs() -> Iterator[list[Ranks]]:
    """Those that were started; the last one may be of use."""
    started: list[Ranks] = []
    yield started
    for pair in started:
        pair.close()


@pytest.fixture
def ranks(pairs: list[Ranks]) -> Ranks:
    """Two processes with a process group; other ones after a test that failed in them."""
    if not pairs or pairs[-1].has_failed:
        pairs.append(Ranks())
    return pairs[-1]
