"""The automatic mode on a GPU: outliers are seen, a spike of the loss is read without waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.adaptive.best_casts import SPACING
from fp8compile.adaptive.loss_spikes import DELAY, LEAST, LossSpikes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. the GPU waits for the host")]
STEPS = 3


def test_losses_reach_the_host_as_they_were() -> None:
    """Each is overwritten at once, as a replayed graph does."""
    spikes, place = LossSpikes(6.0), torch.ones((), device="cuda", dtype=torch.bfloat16)
    for i in range(LEAST + DELAY + 1):
        place.fill_(9.0 if i == LEAST else 1.0)
        why = spikes.add(place)
        assert bool(why) == (i == LEAST + DELAY)
    assert "a loss of 9," in why


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def gradient(model: Regression, step: nn.Module, scale: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1)).cuda().bfloat16() * scale
    step(x).backward()
    grad = model.layers[0].weight.grad
    assert grad is not None
    return grad.float()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_steps_after_a_spike_run_in_bf16(mode: str | None) -> None:
    model, reference = Regression().cuda().bfloat16(), Regression().cuda().bfloat16()
    options = {"select": "all", "strict": True, "adaptive": {"spike_steps": STEPS, "every": 1000}}
    step = torch.compile(model, backend="fp8", options=options if mode is None else {**options, "mode": mode})
    exact = gradient(reference, reference)
    first = LEAST + DELAY + 1
    errors = []
    for i in range(first + STEPS + 2):
        found = gradient(model, step, 100.0 if i == LEAST else 1.0)
        errors.append(float((found - exact).norm() / exact.norm()))
    errors.pop(LEAST)
    in_bf16 = range(first - 1, first - 1 + STEPS)
    assert all((error < 0.01) == (i in in_bf16) for i, error in enumerate(errors)), errors
    (graph,) = [g for g in fp8compile.adaptive_graphs() if g.is_training]
    assert [change.after for change in graph.changes] == [f"bf16 for {STEPS} steps"]


def test_recipe_auto_gives_a_large_row_scales_of_its_own() -> None:
    model, reference = Regression().cuda().bfloat16(), Regression().cuda().bfloat16()
    for each in (model, reference):
        with torch.no_grad():
            each.layers[2].weight[7] *= 1e5
    step = torch.compile(model, backend="fp8", options={"recipe": "auto", "select": "all", "strict": True})
    exact = gradient(reference, reference)
    errors = [float((gradient(model, step) - exact).norm() / exact.norm()) for _ in range(2 * SPACING)]
    graph = [g for g in fp8compile.adaptive_graphs() if g.is_training and g.plan.converted][-1]
    spent = [change for change in graph.changes if change.is_for_noise]
    assert any(change.path == "layers.2" and change.step >= SPACING for change in spent), str(graph)
    assert errors[-1] <= 1.05 * errors[0], errors
    for row in graph.plan.matmuls:
        assert row.milliseconds_by_casts["row × row"] > 0
        assert "both operands together keep" in row.reason or row.decision == "bf16"
