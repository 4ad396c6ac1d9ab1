"""A GPU as the default device, as `torch.set_default_device` and `with torch.device(…)` make it: what is for the host
stays there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. the GPU waits for the host")]


@pytest.fixture(params=["set", "within"])
def on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "set":
        torch.set_default_device("cuda")
        yield
        torch.set_default_device(None)
    else:
        with torch.device("cuda"):
            yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(512, 2048), nn.Linear(2048, 512), nn.Linear(512, 4096, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + self.down(F.silu(self.up(x)))).float(), labels)


@pytest.mark.parametrize("options", [{}, {"adaptive": "auto"}, {"lm_head": True, "chunk_loss": True}], ids=str)
def test_training(on_gpu: None, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net().bfloat16()
    x, labels = torch.randn(1024, 512, dtype=torch.bfloat16), torch.randint(0, 4096, (1024,))
    assert x.is_cuda
    with torch.no_grad():
        expected = model(x, labels).item()
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, **options})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(opt.step, backend="fp8")
    losses = []
    for _ in range(6):
        loss = run(x, labels)
        loss.backward()
        step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(expected, rel=0.01)
    assert losses[-1] < losses[0] - 0.5
    assert any(m.decision == "fp8" for m in fp8compile.last_compile().matmuls)
