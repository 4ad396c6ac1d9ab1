"""Hooks of modules, called from the compiled backward on a GPU: on autograd's thread, and beside CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile

pytestmark = pytest.mark.gpu
SIZE = 512


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)]
    return nn.Sequential(*layers).cuda().bfloat16()


def watched(m: nn.Module, seen: list[tuple[str, float, float]]) -> nn.Module:
    """A hook on each linear that notes the norms of its gradients and halves that of its input."""

    def hook(name: str) -> Any:
        def call(_: nn.Module, of_inputs: tuple[Tensor | None, ...], of_outputs: tuple[Tensor, ...]) -> Any:
            given = of_inputs[0]
            seen.append((name, 0.0 if given is None else given.norm().item(), of_outputs[0].norm().item()))
            return None if given is None else (given / 2,)

        return call

    for name, module in m.named_modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(hook(name))
    return m


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_see_the_gradients_and_change_them(mode: str | None) -> None:
    found, expected = [], []
    mine, theirs = model(), model()
    watched(mine, found)
    watched(theirs, expected)
    x = torch.randn(256, SIZE, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"select": "all", "strict": True}
    compiled = torch.compile(mine, backend="fp8", options={**options, **({"mode": mode} if mode else {})})
    for _ in range(4):
        mine.zero_grad()
        theirs.zero_grad()
        for call in (compiled, theirs):
            call(x).float().square().mean().backward()
    assert len(fp8compile.last_compile().converted) == 3 * 3 - 1
    assert [row[0] for row in found] == [row[0] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row[1:] == pytest.approx(other[1:], rel=0.05)  # FP8's noise in norms
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert nn.functional.cosine_similarity(p.grad.float().flatten(), q.grad.float().flatten(), 0) > 0.99


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_is_around_a_recurrent_module(kind: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
            self.middle = kind(SIZE, SIZE, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x).relu())[0])

    torch.manual_seed(0)
    m = Around().cuda().bfloat16()
    x = torch.randn(16, 32, SIZE, device="cuda", dtype=torch.bfloat16)
    expected = m(x)
    actual = torch.compile(m, backend="fp8", options={"select": "all", "strict": True})(x)
    actual.float().square().mean().backward()
    assert sum(len(plan.converted) for plan in fp8compile.compiles()) == 2 + 3
    assert nn.functional.cosine_similarity(actual.float().flatten(), expected.float().flatten(), 0) > 0.99
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())
