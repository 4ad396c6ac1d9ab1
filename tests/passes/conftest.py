"""What tests of graphs share: the graphs themselves, and a process group for those that hold collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import fx

from fp8compile import backend
from fp8compile.passes import pipeline
from fp8compile.passes.core.snapshot import copy_graph


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A group of one process, which runs the same graphs as a larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Every graph that leaves the pipeline."""
    found: list[fx.Graph] = []

    def run(c, observe=None):
        pipeline.run_pipeline(c, observe)
        found.append(copy_graph(c.graph))

    monkeypatch.setattr(backend, "run_pipeline", run)
    return found
