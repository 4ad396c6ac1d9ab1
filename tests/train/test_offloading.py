"""Saved activations in the host's memory while backward is far: torch's own hooks move what is kept in FP8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

OPTIONS = {"select": "all", "save_min_bytes": 0, "strict": True, "executor": "eager"}
Context = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(around: Context, within: Context = nullcontext, **compile: Any) -> list[Tensor]:
    """Return the gradients of all parameters; `around` the call of what is compiled, `within` it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(512, 64)

    def forward(x: Tensor) -> Tensor:
        with within():
            return model(x)

    with torch.autocast("cpu", torch.bfloat16), around():
        loss = torch.compile(forward, **compile)(x).float().square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def packed(**compile: Any) -> dict[torch.dtype, int]:
    """Return the bytes of the tensors that hooks are given, by dtype, the parameters' left out."""
    found: dict[torch.dtype, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            found[x.dtype] = found.get(x.dtype, 0) + x.nbytes
        return x.clone()

    trained(lambda: saved_tensors_hooks(pack, lambda x: x), **compile)
    return found


@pytest.mark.parametrize("within", [False, True])
def test_what_is_moved_to_the_host_comes_back_exactly(within: bool) -> None:
    """Hooks around the call, and such as Dynamo finds within it."""
    ours = {"backend": "fp8", "options": OPTIONS}
    moved = trained(nullcontext, save_on_cpu, **ours) if within else trained(save_on_cpu, **ours)
    for mine, theirs in zip(moved, trained(nullcontext, **ours), strict=True):
        assert torch.equal(mine, theirs)


def test_hooks_move_half_the_bytes() -> None:
    """Most of it as FP8; what both keep exactly (the input of the norm, its statistics) counts for both."""
    ours, plain = packed(backend="fp8", options=OPTIONS), packed(backend="aot_eager_decomp_partition")
    assert ours[torch.float8_e4m3fn] > 0.5 * sum(ours.values())
    assert sum(ours.values()) < 0.6 * sum(plain.values())
