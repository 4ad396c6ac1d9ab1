"""Elements whose gradient is zero for good, in groups with others: dead neurons, channels and pruned weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import EAGER, OPTIMIZERS
from torch import nn

from fp8compile.state_formats import GROUP


@pytest.mark.parametrize(("name", "arguments"), [("adamw", {"betas": (0.9, 0.95)}), ("sgd", {"momentum": 0.9})])
@pytest.mark.parametrize("dead", [1, 64])
def test_elements_without_gradients_leave_the_others_as_precise(
    name: str, arguments: dict[str, Any], dead: int
) -> None:
    """Weights of neurons that have died: their averages decay without end, in one group with those of others."""
    torch.manual_seed(0)
    mine, exact = (nn.Parameter(torch.zeros(32, GROUP)) for _ in range(2))
    make = OPTIMIZERS[name][0]
    opts = [make([p], lr=0.01, weight_decay=0.0, **arguments) for p in (mine, exact)]
    step = torch.compile(opts[0].step, backend="fp8", options=EAGER)
    mean = torch.randn(32, GROUP) * 0.3
    moved = []
    for i in range(300):
        before = mine.detach().clone(), exact.detach().clone()
        gradient = torch.randn(32, GROUP) + mean
        if i >= 20:
            gradient[:, :dead] = 0
        mine.grad, exact.grad = gradient, gradient.clone()
        step()
        opts[1].step()
        moved = [(p.detach() - x)[:, dead:] for p, x in zip((mine, exact), before, strict=True)]
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[1].norm()
