"""A gradient whose square FP32 cannot hold: AdamW in FP32 goes on with all other elements, and 8-bit states do too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import EAGER, OPTIMIZERS
from torch import nn

from fp8compile.state_formats import GROUP

HUGE, AT = 1e21, 20


@pytest.mark.parametrize("states", ["log", "e4m3", "e5m2/linear"])
@pytest.mark.parametrize(("name", "arguments"), [("adamw", {"betas": (0.9, 0.95)}), ("adamw", {"amsgrad": True})])
def test_all_other_elements_go_on(name: str, arguments: dict[str, Any], states: str) -> None:
    torch.manual_seed(0)
    mine, exact = (nn.Parameter(torch.zeros(32, GROUP)) for _ in range(2))
    make = OPTIMIZERS[name][0]
    opts = [make([p], lr=0.01, weight_decay=0.0, **arguments) for p in (mine, exact)]
    step = torch.compile(opts[0].step, backend="fp8", options={**EAGER, "states": {"first": states, "second": states}})
    mean = torch.randn(32, GROUP) * 0.3
    for i in range(2 * AT):
        before = mine.detach().clone(), exact.detach().clone()
        gradient = torch.randn(32, GROUP) + mean
        if i == AT:
            gradient[0, 3] = HUGE
        mine.grad, exact.grad = gradient, gradient.clone()
        step()
        opts[1].step()
        moved = [p.detach() - x for p, x in zip((mine, exact), before, strict=True)]
        assert mine.isfinite().all()
        if i == AT:
            assert (moved[0][0, 3], moved[1][0, 3]) == (0, 0)
    assert exact.isfinite().all()
    assert (moved[0][1:] - moved[1][1:]).norm() < 0.4 * moved[1][1:].norm()  # other groups are as they always are
    moving = torch.cat([moved[0][0, :3], moved[0][0, 4:]])
    assert moving.abs().max() < 0.02  # coarse while the overflow decays, never more than a step of Adam's
