"""Constant masks that are told to attention, on each of its GPU kernels: gradients are those of eager with the mask."""

from __future__ import annotations

import pytest
import torch
from fake_quantized import sqnr
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8compile
from tests.passes.attention.test_attention_masks import CAUSAL, EVERYTHING, Attention
from tests.passes.attention.test_attention_strides import Attention as Strided
from tests.passes.attention.test_attention_strides import both_directions

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")]

# Another length for each: torch's cache of compiled graphs does not know which attention kernels were allowed.
LENGTHS = {SDPBackend.CUDNN_ATTENTION: 320, SDPBackend.EFFICIENT_ATTENTION: 384}
LEAST_DB = 35.0


@pytest.mark.parametrize("backend", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [*CAUSAL, *EVERYTHING])
def test_gradients_are_those_with_the_mask(name: str, backend: SDPBackend) -> None:
    torch.manual_seed(0)
    model = Attention({**CAUSAL, **EVERYTHING}[name], width=256).cuda().bfloat16()
    x = torch.randn(3, LENGTHS[backend], 256, device="cuda", dtype=torch.bfloat16)
    g = torch.randn_like(x)
    torch.compiler.reset()
    run = torch.compile(model, backend="fp8", dynamic=False, options={"skip": ["*"], "strict": True})
    with sdpa_kernel(backend):
        got = torch.autograd.grad(run(x), list(model.parameters()), g)
        expected = torch.autograd.grad(model(x), list(model.parameters()), g)
    assert [m.kind for m in fp8compile.last_compile().masks] == ["causal" if name in CAUSAL else "everything"]
    for mine, theirs in zip(got, expected, strict=True):
        assert sqnr(theirs, mine) > LEAST_DB


@pytest.mark.parametrize("positional", [False, True])
def test_a_mask_that_is_expanded_along_the_keys_leaves_attention_fused(positional: bool) -> None:
    """Without a copy of it torch takes no fused kernel on a GPU, and there is nobody to tell."""
    torch.manual_seed(0)
    model = Strided(both_directions, positional=positional).cuda().bfloat16()
    x = torch.randn(3, 320, 32, device="cuda", dtype=torch.bfloat16)
    g = torch.randn_like(x)
    torch.compiler.reset()
    run = torch.compile(model, backend="fp8", dynamic=False, options={"skip": ["*"], "strict": True})
    got = torch.autograd.grad(run(x), list(model.parameters()), g)
    expected = torch.autograd.grad(model(x), list(model.parameters()), g)
    plan = fp8compile.last_compile().plans[-1]
    assert [m.kind for m in plan.masks] == ["everything"]
    assert len(plan.matmuls) == 5  # none of attention's
    for mine, theirs in zip(got, expected, strict=True):
        assert sqnr(theirs, mine) > 30  # eager's scores are in FP32
