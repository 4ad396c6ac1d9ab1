"""Whether the GPU waits for the host is seen in steady steps, and said once."""

from __future__ import annotations

import warnings

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


def test_is_said_once(idle: list[bool]) -> None:
    train = step(linear())
    for _ in range(STEADY - 1):
        train()
    with pytest.warns(fp8compile.Fp8Warning, match="waits for the host: 20 of 20 forward passes") as said:
        train()
    assert "capture_step" in str(said[0].message)
    for _ in range(STEADY):
        train()
    other = step(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    for _ in range(STEADY):
        other()


def test_a_busy_gpu_is_not_mentioned(idle: list[bool]) -> None:
    idle[:] = [True] * 15 + [False] * 3 + [True]
    train = step(linear())
    for _ in range(2 * STEADY):
        train()


def test_two_of_twenty_may_be_busy(idle: list[bool]) -> None:
    idle[:] = [True] * 7 + [False] * 2 + [True]
    train = step(linear())
    for _ in range(STEADY - 1):
        train()
    with pytest.warns(fp8compile.Fp8Warning, match="18 of 20"):
        train()


def test_a_short_graph_beside_a_long_one(idle: list[bool]) -> None:
    """The GPU is idle behind the first, which is soon done, and has much to do behind the second."""
    idle[:] = [True, False] * (STEADY + 1)
    train = step(linear(), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    for _ in range(STEADY + 1):
        train()


def test_cuda_graphs_and_inference_are_not_looked_at(idle: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    train = step(linear(), mode="reduce-overhead")
    for _ in range(STEADY):
        train()
    run = torch.compile(linear(), backend="fp8", options={"executor": "eager", "select": "all"})
    with torch.no_grad():
        for _ in range(STEADY):
            run(torch.randn(32, 32))
    monkeypatch.setattr(late_host, "is_capturing", lambda: True)
    train = step(linear())
    for _ in range(STEADY):
        train()


def test_a_cpu_has_no_gpu_to_wait() -> None:
    train = step(linear())
    with warnings.catch_warnings():
        warnings.simplefilter("error", fp8compile.Fp8Warning)
        for _ in range(STEADY):
            train()
