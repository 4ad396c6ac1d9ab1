"""Processes that all tests of this folder share: their start and first compilation take longer than a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

GPUS = {"backend": "cpu:gloo,cuda:nccl", "device": "cuda"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --on-gpus, leave out what makes its processes by itself."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    alone = {item for item in here if "start" not in getattr(item, "fixturenames", ())}
    if config.getoption("--on-gpus"):
        config.hook.pytest_deselected(items=alone)
        items[:] = [item for item in items if item not in alone]


@pytest.fixture(autouse=True)
def where_ranks_are(pytestconfig: pytest.Config) -> Iterator[None]:
    """Make what a test computes by itself where its ranks make theirs."""
    torch.set_default_device(GPUS["device"] if pytestconfig.getoption("--on-gpus") else None)
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def start(pytestconfig: pytest.Config) -> Callable[[int], Ranks]:
    """Start so many processes with a process group; the test skips where each is to have a GPU and there are fewer."""
    on: dict[str, Any] = GPUS if pytestconfig.getoption("--on-gpus") else {}

    def started(world: int) -> Ranks:
        if on and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs")
        return Ranks(world, parents=True, **on)

    return started


@pytest.fixture(scope="session")
def processes(start: Callable[[int], Ranks]) -> Iterator[Callable[[int], Ranks]]:
    """So many processes; others, once a function has failed in them and one may still wait."""
    started: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world in started and started[world].failed:
            started.pop(world).close()
        if world not in started:
            started[world] = start(world)
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
