"""Times of the parts of a step: each is measured, and what lies between is the rest."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.insight.command_line import main
from fp8compile.insight.step_times import NEEDED, StepTimes

STEPS = NEEDED + 1  # the last one is not seen to end
MS = {"backward": 12.0, "optimizer": 4.0, "rest": 16.0}


class Sleeps(torch.autograd.Function):
    """An operation whose backward takes a known time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(MS["backward"] / 1e3)
        return gradient


def train(steps: int, accumulated: int = 1, with_optimizer: bool = True) -> None:
    model = nn.Linear(64, 64)
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "select": "all"})
    opt = torch.optim.AdamW(model.parameters(), capturable=True)
    step = torch.compile(opt.step, backend="fp8", options={"executor": "eager"}) if with_optimizer else lambda: None
    opt.register_step_pre_hook(lambda *_: time.sleep(MS["optimizer"] / 1e3))
    for _ in range(steps):
        for _ in range(accumulated):
            Sleeps.apply(run(torch.randn(16, 64))).square().mean().backward()
            with torch.no_grad():
                run(torch.randn(16, 64))
        time.sleep(MS["rest"] / 1e3)
        step()
        opt.zero_grad()


def figures(text: str) -> dict[str, float]:
    return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+|the rest) +([\d.]+)", text, re.MULTILINE)}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_parts(accumulated: int) -> None:
    with StepTimes().measuring() as times:
        train(STEPS, accumulated)
    assert times.is_complete
    found = figures(times.text())
    # A sleep is not shorter than asked for. Each part has its own, so that none can hold another's.
    assert found["backward"] >= accumulated * MS["backward"]
    assert found["optimizer"] >= MS["optimizer"]
    assert found["the rest"] >= MS["rest"]
    step = float(re.search(r"A step takes ([\d.]+) ms", times.text())[1])
    assert sum(found.values()) == pytest.approx(step, rel=0.3)  # medians of different steps


def test_without_a_compiled_optimizer() -> None:
    with StepTimes().measuring() as times:
        train(STEPS, with_optimizer=False)
    found = figures(times.text())
    assert found["optimizer"] == 0
    assert found["backward"] >= MS["backward"]


def test_backward_is_put_back() -> None:
    backward = torch.autograd.backward
    with pytest.raises(RuntimeError), StepTimes().measuring():
        raise RuntimeError
    assert torch.autograd.backward is backward


def test_too_few_steps() -> None:
    with StepTimes().measuring() as times:
        train(3)
    with pytest.raises(fp8compile.Fp8Error, match="2 steps were seen, and 20 are needed"):
        times.text()


SCRIPT = """
import sys, torch
model = torch.nn.Linear(32, 32)
run = torch.compile(model, backend="fp8", options={"executor": "eager", "select": "all"})
for _ in range(int(sys.argv[1])):
    run(torch.randn(16, 32)).sum().backward()
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["doctor", "--model", str(script), str(STEPS)]) == 0
    said = capsys.readouterr().out
    assert "A step takes" in said
    assert "There is no GPU" in said or torch.cuda.is_available()
    assert main(["doctor", "--model", str(script), "2"]) == 2
    assert main(["doctor", "--model"]) == 2
