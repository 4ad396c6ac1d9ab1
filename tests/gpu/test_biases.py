"""Attention that reads a bias or packed sequences, on a GPU: T5 at the sizes of its layers, and varlen attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from fake_quantized import sqnr
from torch import Tensor, nn

pytestmark = pytest.mark.gpu
LEAST = 12.0  # dB: gradients that have been through four layers in FP8, each of whose casts keeps 31


def gradients(
    model: nn.Module, run: Callable[..., Any], loss: Callable[[Any], Tensor], **inputs: Any
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss(run(**inputs)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: nn.Module, loss: Callable[[Any], Tensor], select: str = "profitable", **inputs: Any) -> None:
    """All gradients are finite, and near those of BF16 eager."""
    torch.compiler.reset()
    want = gradients(model, model, loss, **inputs)
    run = torch.compile(model, backend="fp8", options={"strict": True, "select": select})
    got = gradients(model, run, loss, **inputs)
    assert got.keys() == want.keys()
    far = {name: sqnr(want[name], got[name]) for name in want if not got[name].isfinite().all()}
    assert not far, far
    far = {name: s for name in want if (s := sqnr(want[name], got[name])) < LEAST and want[name].dim() > 1}
    assert not far, far


@pytest.mark.parametrize("masked", [False, True])
def test_t5_trains(masked: bool) -> None:
    config = transformers.T5Config(
        d_model=1024, d_ff=2816, num_layers=2, num_decoder_layers=2, num_heads=16, d_kv=64, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).cuda().bfloat16().train()
    ids, labels = (torch.randint(1, 32000, (16, 512), device="cuda") for _ in range(2))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels, "use_cache": False}
    if masked:
        lengths = torch.arange(32, 512, 30, device="cuda")[:16, None]
        inputs["attention_mask"] = (torch.arange(512, device="cuda") < lengths).long()
    compare(model, lambda out: out.loss, **inputs)


class Packed(nn.Module):
    """Attention within sequences that lie one behind the other."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(1024, 3072), nn.Linear(1024, 1024)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (16, 64)) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, ends, ends, 512, 512).flatten(1))


def test_varlen_attention_trains() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn"):
        pytest.skip("this torch has no varlen_attn")
    torch.manual_seed(0)
    model = Packed(varlen.varlen_attn).cuda().bfloat16()
    ends = torch.tensor([0, 512, 640, 1152, 2048 - 512, 2048], dtype=torch.int32, device="cuda")
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    compare(model, lambda y: y.float().square().mean(), select="all", x=x, ends=ends)
