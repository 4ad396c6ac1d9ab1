"""Processes that all tests of this folder share: their start and first compilation take longer than a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes with a process group; others, once a function has failed in them and one may still wait."""
    started: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world in started and started[world].failed:
            started.pop(world).close()
        if world not in started:
            started[world] = Ranks(world, parents=True)
        return started[world]

    yield get
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def ranks(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(2)


@pytest.fixture
def three(processes: Callable[[int], Ranks]) -> Ranks:
    return processes(3)
