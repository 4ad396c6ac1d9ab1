"""Tensors of a GPU that is not the current one: the same bits as on the current one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, set_gradients
from torch import nn

import fp8compile
from fp8compile.kernels.optimizer.scattered_numbers import ScatteredNumbers
from fp8compile.optimizer.state_parts import INNER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SHAPES = ((96, 64), (64, 65), (7,), (30, 4, 50))
DEVICES = ("cuda:0", "cuda:1")


def bits(opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for p in (p for group in opt.param_groups for p in group["params"]):
        found.append(p.detach().cpu())
        for x in opt.state[p].values():
            parts = [getattr(x, n) for n in INNER] if isinstance(x, fp8compile.FP8State) else [x]
            found += [part.cpu() for part in parts if part is not None]
    return found


def stepped(name: str, devices: tuple[str, ...]) -> list[torch.Tensor]:
    """Parameters and states after four steps; parameters lie on the devices by turns."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(x.to(devices[i % len(devices)], torch.bfloat16)) for i, x in enumerate(values)]
    kind, arguments = OPTIMIZERS[name]
    opt: torch.optim.Optimizer = kind(parameters, lr=0.01, **arguments)
    step: Any = torch.compile(opt.step, backend="fp8", options={"strict": True})
    for i in range(4):
        set_gradients(parameters, i)
        step()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    return bits(opt)


@pytest.mark.parametrize("devices", [DEVICES[1:], DEVICES])
@pytest.mark.parametrize("name", ["adamw", "rmsprop_centered"])
def test_shared_steps(name: str, devices: tuple[str, ...]) -> None:
    expected = stepped(name, DEVICES[:1])
    assert all(map(torch.equal, stepped(name, devices), expected))


def test_steps_in_one_graph() -> None:
    """Of an optimizer with a step of its own."""
    expected = stepped("lion", DEVICES[:1])
    assert all(map(torch.equal, stepped("lion", DEVICES[1:]), expected))


@pytest.mark.parametrize("format", ["log", "log/stochastic", "e4m3"])
def test_states_outside_of_steps(format: str) -> None:
    x = torch.randn(4096, 33, generator=torch.Generator().manual_seed(0))
    first, second = (fp8compile.FP8State.of(x.to(device), format=format) for device in DEVICES)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first.parts(), second.parts(), strict=True))
    assert torch.equal(first.dequantize().cpu(), second.dequantize().cpu())


def test_numbers() -> None:
    given = [torch.tensor(float(i), device=DEVICES[1]) for i in range(5)]
    numbers = ScatteredNumbers(given)
    numbers.add(1)
    assert numbers.vector(6).tolist() == [1, 2, 3, 4, 5, 1]


class Tokens(nn.Module):
    """A head with a loss that is computed in chunks, behind layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.LayerNorm(512))
        self.head = nn.Linear(512, 32000, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)).float(), labels)


@pytest.mark.parametrize("executor", ["inductor", "eager"])
def test_models(executor: str) -> None:
    gradients = []
    for device in DEVICES:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Tokens().to(device, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(1024, 512, generator=generator).to(device, torch.bfloat16)
        labels = torch.randint(32000, (1024,), generator=generator).to(device)
        run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "executor": executor})
        run(x, labels).backward()
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 7
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(a.abs().max()))
