"""torch's default dtype, which a user may have set, decides nothing: bit for bit what it is by FP32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from quick import quicken
from torch import Tensor, nn

from fp8compile.kernels.reference import state_reference
from fp8compile.optimizer.states import FP8State

quicken()
DEFAULTS = (torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(dtype: torch.dtype, recipe: str, executor: str) -> list[Tensor]:
    """Output and gradients of an FP32 model that is compiled and run under a default dtype."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(64, 64)
    options = {"select": "all", "strict": True, "recipe": recipe, "executor": executor}
    with default(dtype):
        out = torch.compile(model, backend="fp8", options=options)(x)
        out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("recipe", "executor", "defaults"),
    [
        ("mixed", "inductor", DEFAULTS[:1]),
        ("blockwise", "eager", DEFAULTS),
        ("tensorwise", "eager", DEFAULTS),
    ],
)
def test_a_model_computes_the_same(recipe: str, executor: str, defaults: Sequence[torch.dtype]) -> None:
    wanted = trained(torch.float32, recipe, executor)
    assert len(wanted) == 5
    for dtype in defaults:
        found = trained(dtype, recipe, executor)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), dtype


@pytest.mark.parametrize("name", ["log", "log/stochastic", "e4m3", "e5m2/stochastic", "e4m3/linear"])
def test_a_state_is_stored_and_read_the_same(name: str) -> None:
    signed = torch.randn(256, generator=torch.Generator().manual_seed(0))
    counter = torch.ones(1, dtype=torch.int32)
    for x in (signed, signed.square() * 1e-3):
        payload, side = state_reference.encode(x, name, counter)
        read = state_reference.decode(payload, side, name)
        for dtype in DEFAULTS:
            with default(dtype):
                found = state_reference.encode(x, name, counter)
                assert torch.equal(found[0], payload)
                assert torch.equal(found[1], side)
                assert torch.equal(state_reference.decode(payload, side, name), read), dtype


def stepped(dtype: torch.dtype) -> list[Tensor]:
    """Parameters after three compiled steps of AdamW under a default dtype."""
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 128, generator=random)) for _ in range(2)]  # large enough for 8 bits
    opt = torch.optim.AdamW(parameters, lr=1e-2)
    with default(dtype):
        step = torch.compile(opt.step, backend="fp8", options={"strict": True, "executor": "eager"})
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(64, 128, generator=random, dtype=torch.float32)
            step()
    assert isinstance(opt.state[parameters[0]]["exp_avg"], FP8State)
    return [p.detach() for p in parameters]


def test_an_optimizer_steps_the_same() -> None:
    wanted = stepped(torch.float32)
    for dtype in DEFAULTS:
        most = 1e-5 if dtype == torch.float64 else 0.0  # torch counts steps in FP64 then, and powers are of it
        pairs = zip(stepped(dtype), wanted, strict=True)
        assert all((a - b).abs().max() <= most for a, b in pairs), dtype
