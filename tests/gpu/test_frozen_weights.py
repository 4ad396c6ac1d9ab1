"""Frozen weights on a GPU: the bits of casts in every call, launched and within CUDA graphs, and what they hold."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from torch import Tensor, nn

import fp8compile
from fp8compile.torch_hooks import kept_casts

pytestmark = pytest.mark.gpu

OPTIONS = {"select": "all", "strict": True}


def llama() -> Any:
    return ZOO["llama"]().model.cuda().bfloat16().eval().requires_grad_(False)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@torch.no_grad()
def test_bits_are_those_of_casts_in_every_call(mode: str | None) -> None:
    model = llama()
    prompt = tokens().cuda()
    given = {**OPTIONS, "frozen": True, **({"mode": mode} if mode else {})}
    mine = torch.compile(model, backend="fp8", options=given, dynamic=False)
    theirs = torch.compile(model, backend="fp8", options=OPTIONS, dynamic=False)

    def compare() -> Tensor:
        for length in (16, 1):
            for _ in range(4):  # a CUDA graph is captured in the second call
                found = mine(input_ids=prompt[:, :length]).logits.clone()
                assert torch.equal(found, theirs(input_ids=prompt[:, :length]).logits)
        return found

    before = compare()
    count = len(kept_casts._values.by_key)
    assert count
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(compare(), before)
    assert len(kept_casts._values.by_key) == count


@torch.no_grad()
def test_payloads_are_half_of_the_weights() -> None:
    """And nothing else is held: 16 MiB of payloads beside 32 MiB of weights."""
    linear = nn.Linear(4096, 4096, bias=False).cuda().bfloat16().requires_grad_(False)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(lambda x: linear(x) * 1, backend="fp8", options={**OPTIONS, "frozen": True})
    run(x)
    torch.cuda.synchronize()
    values = [x for x in kept_casts._values.by_key.values() if not x.is_of_freed]  # those stay, whoever's they are
    held = sum(x.tensor.nbytes for x in values if x.tensor is not None)
    assert 4096 * 4096 <= held < 4096 * 4096 + 2**16
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run(x)
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@torch.no_grad()
def test_weights_are_freed(mode: str | None) -> None:
    """Of 64 MiB in BF16, 32 in FP8 remain, with the bits that there were."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2))).cuda().bfloat16()
    model = fp8compile.freeze(model, options=OPTIONS, mode=mode)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        right = model(x).clone()
    assert fp8compile.free_weights(model) == 2**26
    for _ in range(4):
        assert torch.equal(model(x), right)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < -(2**25) + 2**22  # and what graphs work in
