"""A step that waits for the host is warned of once, one that does not is not; the doctor times both."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.insight.step_times import StepTimes
from fp8compile.torch_hooks.calls.late_host import LOOKED_AT, SKIPPED

pytestmark = pytest.mark.gpu


def train(rows: int, width: int, steps: int = SKIPPED + LOOKED_AT + 5) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    model.cuda().bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all"})
    opt = torch.optim.AdamW(model.parameters())
    step = torch.compile(opt.step, backend="fp8")
    for _ in range(steps):
        run(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        step()
        opt.zero_grad()


def test_short_steps() -> None:
    with pytest.warns(fp8compile.Fp8Warning, match="waits for the host"):
        train(64, 256)


def test_long_steps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fp8compile.Fp8Warning)
        train(16384, 4096)


@pytest.mark.parametrize(("rows", "width", "waits"), [(64, 256, True), (16384, 4096, False)])
def test_times(rows: int, width: int, waits: bool) -> None:
    with StepTimes().measuring() as times, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(rows, width)
    text = times.text()
    assert ("it waits" in text) == waits
    gpu = [float(x) for x in re.findall(r"^(?:forward|backward|optimizer) +[\d.]+ +([\d.]+)", text, re.MULTILINE)]
    assert len(gpu) == 3
    if not waits:
        flops = 8 * 2 * rows * width * width
        assert flops / 2e15 * 1e3 < gpu[0] < flops / 1e14 * 1e3  # between what no GPU of these can do, and 100 TFLOP/s
        assert gpu[1] > gpu[0] > 0
