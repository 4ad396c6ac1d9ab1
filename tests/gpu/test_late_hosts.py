"""A step that waits for the host is warned of once, one that does not is not; the doctor times both.

Other processes on the GPU or the host may disturb the times of a step: what is asked for must be seen in one of three.
"""

from __future__ import annotations

import re
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import process_state
from fp8compile.insight.step_times import StepTimes
from fp8compile.torch_hooks.calls.late_host import LOOKED_AT, SKIPPED

pytestmark = pytest.mark.gpu
TIMES = 3


@torch.library.custom_op("fp8compile_tests::wait_on_host", mutates_args=())
def wait_on_host(x: Tensor) -> Tensor:
    """Return a copy, after 50 ms of the host: a GPU that other processes share has done its work by then as well."""
    time.sleep(0.05)
    return x.clone()


@wait_on_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


wait_on_host.register_autograd(lambda ctx, grad: grad)


class LateHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wait_on_host(x)


def train(rows: int, width: int, *more: nn.Module, steps: int = SKIPPED + LOOKED_AT + 5) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)), *more)
    model.cuda().bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all"})
    opt = torch.optim.AdamW(model.parameters())
    step = torch.compile(opt.step, backend="fp8")
    for _ in range(steps):
        run(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        step()
        opt.zero_grad()


def warned_of(rows: int, width: int, *more: nn.Module) -> bool:
    process_state.reset()  # each training is looked at anew
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(rows, width, *more)
    return any(issubclass(w.category, fp8compile.Fp8Warning) and "waits for the host" in str(w.message) for w in found)


def test_short_steps() -> None:
    assert any(warned_of(64, 256, LateHost()) for _ in range(TIMES))


def test_long_steps() -> None:
    assert not all(warned_of(65536, 4096) for _ in range(TIMES))


def times_of(rows: int, width: int) -> str:
    with StepTimes().measuring() as times, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(rows, width)
    return times.text()


@pytest.mark.parametrize(("rows", "width", "waits"), [(64, 256, True), (65536, 4096, False)])
def test_times(rows: int, width: int, waits: bool) -> None:
    text = next((text for text in (times_of(rows, width) for _ in range(TIMES)) if ("it waits" in text) == waits), "")
    assert text
    gpu = [float(x) for x in re.findall(r"^(?:forward|backward|optimizer) +[\d.]+ +([\d.]+)", text, re.MULTILINE)]
    assert len(gpu) == 3
    if not waits:
        flops = 8 * 2 * rows * width * width
        assert flops / 2e15 * 1e3 < gpu[0] < flops / 1e14 * 1e3  # between what no GPU of these can do, and 100 TFLOP/s
        assert gpu[1] > gpu[0] > 0
