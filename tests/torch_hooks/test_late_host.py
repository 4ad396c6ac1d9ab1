"""Whether the GPU waits for the host is seen in steady steps, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.torch_hooks.calls import late_host


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A GPU that says each of these in turn, and then the last one again; the tests' tensors count as being on it."""
    says = [True]
    monkeypatch.setattr(late_host, "gpu_of", lambda args: torch.device("cuda:0"))
    monkeypatch.setattr(late_host, "is_idle", lambda device: says.pop(0) if len(says) > 1 else says[0])
    return says


def step(*models: nn.Module, mode: str | None = None):
    given = {"executor": "eager", "select": "all"} | ({"mode": mode} if mode else {})
    runs = [torch.compile(model, backend="fp8", options=given) for model in models]

    def train() -> None:
        x = torch.randn(32, 32)
        for run in runs:
            x = run(x)
        x.square().mean().backward()

    return train


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU())


STEADY = late_host.SKIPPED + late_host.LOOKED_AT


def warned(train: Callable[[], object], times: int) -> list[str]:
    """What is said in so many steps."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", fp8compile.Fp8Warning)
        for _ in range(times):
            train()
    return [str(w.message) for w in said if w.category is fp8compile.Fp8Warning]


def test_is_said_once(idle: list[bool]) -> None:
    train = step(linear())
    assert warned(train, STEADY - 1) == []
    (said,) = warned(train, 1)
    assert "waits for the host: 20 of 20 forward passes" in said
    assert "capture_step" in said
    assert warned(train, STEADY) == []
    assert warned(step(nn.Sequential(nn.Linear(32, 32), nn.Tanh())), STEADY) == []


def test_a_busy_gpu_is_not_mentioned(idle: list[bool]) -> None:
    idle[:] = [True] * 15 + [False] * 3 + [True]
    assert warned(step(linear()), 2 * STEADY) == []
    assert idle == [True]  # it was asked, three times when it was busy


def test_two_of_twenty_may_be_busy(idle: list[bool]) -> None:
    idle[:] = [True] * 7 + [False] * 2 + [True]
    train = step(linear())
    assert warned(train, STEADY - 1) == []
    (said,) = warned(train, 1)
    assert "18 of 20" in said


def test_a_short_graph_beside_a_long_one(idle: list[bool]) -> None:
    """The GPU is idle behind the first, which is soon done, and has much to do behind the second."""
    idle[:] = [True, False] * (STEADY + 1)
    train = step(linear(), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    assert warned(train, STEADY + 1) == []
    # the first graph has had its last look, which ends them: the second has had one less
    assert len(idle) == 2 * (STEADY + 1) - (2 * late_host.LOOKED_AT - 1)


def test_cuda_graphs_and_inference_are_not_looked_at(idle: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    idle[:] = [True, True]
    assert warned(step(linear(), mode="reduce-overhead"), STEADY) == []
    run = torch.compile(linear(), backend="fp8", options={"executor": "eager", "select": "all"})
    with torch.no_grad():
        assert warned(lambda: run(torch.randn(32, 32)), STEADY) == []
    monkeypatch.setattr(late_host, "is_capturing", lambda: True)
    assert warned(step(linear()), STEADY) == []
    assert idle == [True, True]  # nobody has asked


def test_a_cpu_has_no_gpu_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(late_host, "is_idle", lambda device: bool(asked.append(device)) or True)
    assert warned(step(linear()), STEADY) == []
    assert asked == []
