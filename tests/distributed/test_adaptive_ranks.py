"""The automatic mode on two ranks: they decide together, by what both measured."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from where import device_type, seeded

import fp8compile
from fp8compile.adaptive.captured import CapturedGraph
from fp8compile.adaptive.loss_spikes import DELAY, LEAST

RUN = {"select": "all", "executor": "eager", "save_min_bytes": 0}
TOGETHER = {"ranks": "world"}


class Gained(nn.Module):
    """Two layers; `gain` multiplies what the second one reads. Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 256), nn.Linear(256, 16)
        self.register_buffer("gain", torch.ones(256))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.gain).float().square().mean()


def trained(
    rank: int,
    steps: int,
    planted: float,
    adaptive: dict[str, Any],
    scales: Any = None,
    where: int = 1,
    rows: Any = lambda rank, i: 32,
    **more: Any,
) -> list[str]:
    """Train with another input on each rank, and one rank's `gain` planted; returns all changes, and why no more come.

    rows: of the input of a rank at a step.
    """
    torch.compiler.reset()
    model = Gained()
    if rank == where:
        model.gain[3] = planted
    options = {**RUN, "adaptive": {"every": 4, **adaptive}, **more}
    step = torch.compile(model, backend="fp8", options=options)
    for i in range(steps):
        x = torch.randn(rows(rank, i), 32, generator=seeded(rank))
        with torch.autocast(device_type(), torch.bfloat16):
            step(x * (scales(rank, i) if scales else 1.0)).backward()
    (graph,) = [g for g in fp8compile.adaptive_graphs() if g.is_training]
    return [*map(str, graph.changes), graph.why_done]


def test_ranks_decide_by_what_one_of_them_measured(ranks: Ranks) -> None:
    first, second = ranks.run(trained, 6, 1e6, TOGETHER)
    assert first == second  # steps and evidence too
    assert any("second output" in change and "bf16" in change for change in first)
    alone, planted = ranks.run(trained, 6, 1e6, {})
    assert alone == [""]
    assert len(planted) > 1


def test_ranks_agree_that_nothing_is_to_be_changed(ranks: Ranks) -> None:
    assert ranks.run(trained, 6, 1.0, TOGETHER) == [[""], [""]]


def partly_converted(rank: int) -> list[str]:
    """Nothing of rank 1's graph is in FP8, as where its batch is too small to gain by it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(rank, 20, 1e6, TOGETHER, where=0, skip=["*"] if rank else [])


def test_a_rank_with_nothing_in_fp8_decides_with_the_others(ranks: Ranks) -> None:
    first, second = ranks.run(partly_converted)
    assert any("second output" in change and "bf16" in change for change in first)
    assert first[-1] == second[-1] == ""


def of_other_lengths(rank: int) -> str:
    """Rank 1's lengths change, so that it compiles its graph again at another step than rank 0."""
    try:
        trained(rank, 12, 1.0, TOGETHER, rows=lambda rank, i: 32 + 16 * rank * i)
    except fp8compile.Fp8Error as error:
        return str(error)
    return ""


def test_ranks_that_run_different_graphs_are_told(ranks: Ranks) -> None:
    for said in ranks.run(of_other_lengths):
        assert "ranks that decide together ran different graphs (rank 0: " in said
        assert "dynamic=True" in said


def in_a_group(rank: int) -> list[str]:
    """Each rank in a group of its own."""
    groups = [dist.new_group([i]) for i in range(2)]
    return trained(rank, 6, 1e6, {"ranks": groups[rank]})


def test_a_group_may_be_a_part_of_the_ranks(ranks: Ranks) -> None:
    alone, planted = ranks.run(in_a_group)
    assert alone == [""]
    assert len(planted) > 1


def _once(rank: int, step: int) -> float:
    return 100.0 if (rank, step) == (1, LEAST) else 1.0


def test_a_spike_of_one_rank_is_a_spike_of_all(ranks: Ranks) -> None:
    first, second = ranks.run(trained, LEAST + DELAY + 2, 1.0, TOGETHER | {"spike_steps": 2}, _once)
    assert first == second
    assert f"step {LEAST + DELAY + 1}: (the model itself) matmuls: fp8 → bf16 for 2 steps" in first[0]
    alone, spiked = ranks.run(trained, LEAST + DELAY + 2, 1.0, {"spike_steps": 2}, _once)
    assert (len(alone), len(spiked)) == (1, 2)


def failing(rank: int) -> list[str]:
    """Rank 1 cannot compile a graph again."""
    again = CapturedGraph.again

    def fails(self: CapturedGraph, options: Any) -> Any:
        if rank == 1 and options.watch is None:
            raise RuntimeError("no space is left")
        return again(self, options)

    with mock.patch.object(CapturedGraph, "again", fails), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(rank, 6, 1e6, TOGETHER)


def test_where_one_rank_cannot_compile_all_stay_as_they_are(ranks: Ranks) -> None:
    first, second = ranks.run(failing)
    assert first[0].startswith("not compiled again: rank 1 of the group: ")
    assert "no space is left" in first[0]
    assert second[0].startswith("not compiled again: ")
