"""Weights that are cast once a step, on a GPU: the bits of casts in every batch, by Inductor and by CUDA graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.torch_hooks import kept_casts
from tests.gpu.test_zoo import on_gpu

pytestmark = pytest.mark.gpu

OPTIONS = {"select": "all", "strict": True}


def trained(name: str, options: dict[str, Any], eight_bit: bool, mode: str | None = None) -> list[Tensor]:
    """Return losses and weights of four steps of three batches."""
    torch._dynamo.reset()
    case = on_gpu(name)
    model: Any = case.model
    given = {**options, "skip": list(case.skip), **({"mode": mode} if mode else {})}
    run = torch.compile(model, backend="fp8", options=given, dynamic=False)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=not eight_bit)
    if mode:
        for p in model.parameters():  # or the first gradient would lie where the next replay writes
            p.grad = torch.zeros_like(p)
    step = torch.compile(opt.step, backend="fp8") if eight_bit else opt.step
    found = []
    for _ in range(4):
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            loss = case.loss(run(**case.inputs))
            loss.backward()
            found.append(loss.detach().clone())
        step()
        opt.zero_grad(set_to_none=mode is None)
        found += [p.detach().clone() for p in model.parameters()]
    kept = [x for x in kept_casts._values.by_key.values() if x.tensor is not None and not x.is_of_freed]
    assert bool(kept) == bool(options.get("keep_casts"))
    return found


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "mixtral", "checkpoint"])
def test_bits_are_those_of_casts_in_every_batch(name: str, eight_bit: bool) -> None:
    mine = trained(name, {**OPTIONS, "keep_casts": True}, eight_bit)
    for i, (a, b) in enumerate(zip(mine, trained(name, OPTIONS, eight_bit), strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cuda_graphs_replay_with_payloads_that_are_cast_again(name: str) -> None:
    mine = trained(name, {**OPTIONS, "keep_casts": True}, False, "reduce-overhead")
    for i, (a, b) in enumerate(zip(mine, trained(name, OPTIONS, False, "reduce-overhead"), strict=True)):
        assert torch.equal(a, b), i


def test_payloads_take_two_bytes_an_element_and_no_more_while_they_are_computed_again() -> None:
    """Four weights of 32 MiB in BF16: payloads of two layouts are 32 MiB each."""
    torch.manual_seed(0)
    size = 4096
    model: Any = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4))).cuda().bfloat16()
    x = torch.randn(16, size, device="cuda").bfloat16()

    def peak(options: dict[str, Any]) -> list[int]:
        torch._dynamo.reset()
        gc.collect()
        run = torch.compile(model, backend="fp8", options=options)
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        peaks = []
        for _ in range(4):
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                run(x).float().square().sum().backward()
                peaks.append(torch.cuda.max_memory_allocated())
            opt.step()
            opt.zero_grad()
        return peaks[2:]

    mine, theirs = peak({**OPTIONS, "keep_casts": True}), peak(OPTIONS)
    payloads = 4 * 2 * size**2 - size**2  # the first layer's input needs no gradient
    assert max(mine) <= max(theirs) + payloads + 2**20
