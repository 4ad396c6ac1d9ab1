"""A default device that a user has set: training is what it is without. On a CPU, "meta" stands for a GPU, as a tensor
that is made there by mistake fails wherever it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile

CAST = {"delayed": {"history": 2}}
DELAYED = {"base": "tensorwise", "output": {"left": CAST, "right": CAST}}


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.head = nn.RMSNorm(64), nn.Linear(64, 512, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.second(F.silu(self.first(self.norm(x))))
        return F.cross_entropy(self.head(x).float(), labels)


def trained(**options: Any) -> list[Tensor]:
    """Losses of four steps and the parameters after them."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        model = Net().bfloat16()
        for p in model.parameters():
            nn.init.normal_(p, std=0.1, generator=generator)
        x = torch.randn(64, 64, generator=generator).bfloat16()
        labels = torch.randint(0, 512, (64,), generator=generator)
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "executor": "eager", **options})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt_step = torch.compile(opt.step, backend="fp8")
    usual = contextlib.nullcontext() if torch.__version__ >= "2.13" else torch.device("cpu")  # 2.11: steps lie there
    losses = []
    for _ in range(4):
        loss = run(x, labels)
        loss.backward()
        with usual:
            opt_step()
        opt.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": DELAYED}, {"chunk_loss": True}, {"lm_head": True, "chunk_loss": 32}, {"adaptive": "auto"}],
    ids=str,
)
def test_training_is_what_it_is_without(options: dict[str, Any]) -> None:
    expected = trained(**options)
    torch.set_default_device("meta")
    got = trained(**options)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).norm() <= 2**-12 * b.double().norm()  # optimizers differ in single last bits


def test_lines_of_source_are_the_users() -> None:
    torch.set_default_device("meta")
    trained(chunk_loss=True)
    assert "F.cross_entropy" in str(fp8compile.last_compile().table("losses"))
