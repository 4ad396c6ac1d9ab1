"""benchmarks/training/gradient_bias.py: chance is told from direction, beside the gradients that BF16 has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_convergence import TEXT
from torch import nn

from benchmarks.training import convergence, gradient_bias
from benchmarks.training.convergence_report import Run
from corpus import load_corpus


@pytest.mark.parametrize("direction", [0.0, 0.2])
def test_a_bias_is_what_chance_leaves(direction: float) -> None:
    """Errors of size 1 by chance, beside a mean gradient of size 1 with noise of its own."""
    torch.manual_seed(0)
    model = nn.Linear(256, 64, bias=False)
    bias = gradient_bias.Bias(model)
    mean, error = (torch.nn.functional.normalize(torch.randn(64, 256), dim=(0, 1)) for _ in range(2))
    for _ in range(200):
        g = mean + torch.randn(64, 256) / 128
        bias.add([g], [g + direction * error + torch.randn(64, 256) / 128])
    row = bias.rows()["all"]
    assert row["noise"] == pytest.approx(math.sqrt((1 + direction**2) / 2), rel=0.02)
    assert row["bias"] == pytest.approx(direction, abs=0.05)
    assert row["along"] == pytest.approx(0, abs=0.02)
    assert row["beside"] == pytest.approx(direction / math.sqrt(2), abs=0.04)


def test_gradients_that_are_too_short_lie_along() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    bias = gradient_bias.Bias(model)
    for seed in range(3):
        torch.manual_seed(seed)
        gradients = [torch.ones_like(p) + 0.1 * torch.randn_like(p) for p in model.parameters()]
        bias.add(gradients, [g * 0.9 for g in gradients])
    for row in bias.rows().values():
        assert (row["noise"], row["bias"], row["along"]) == pytest.approx((0.1, 0.1, -0.1), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "group"),
    [("blocks.3.attention.q.weight", "q"), ("lm_head.weight", "lm_head"), ("0.bias", "0.bias")],
)
def test_a_parameter_belongs_to_its_module(name: str, group: str) -> None:
    assert gradient_bias.group_of(name) == group


def test_a_run_is_measured_against_bf16() -> None:
    torch.set_num_threads(1)
    tiny = convergence.SIZES["tiny"]
    small = replace(tiny, model=replace(tiny.model, n_layers=1), steps=4)
    settings = convergence.Settings(small, "cpu", "all", "fp32", "eager", "")
    corpus = load_corpus(TEXT, small.seq)
    rows = gradient_bias.measure(settings, corpus, "BF16", None, 2)
    assert rows["all"]["noise"] == 0
    rows = gradient_bias.measure(settings, corpus, "O2 mixed", None, 2)
    trainer = convergence.Trainer(settings, corpus, Run("O2 mixed", 0, 4))
    squares = []
    for starts in trainer.starts[:2]:
        found = []
        for step in (trainer.model, trainer.step):
            trainer.loss(corpus.train, starts, step).backward()
            found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
            trainer.model.zero_grad()
        squares.append([(found[1] - found[0]).square().sum().item(), found[0].square().sum().item()])
    errors, gradients = (sum(each) for each in zip(*squares, strict=True))
    assert rows["all"]["noise"] == pytest.approx(math.sqrt(errors / gradients), rel=1e-3)
    assert 0.005 < rows["all"]["noise"] < 0.2
