"""FP8 checkpoints written from a GPU: the bytes that a CPU writes, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_quantized import sqnr
from models import SIZES, tokens, unsettled

import fp8compile
from fp8compile.serving.layouts import LAYOUTS

pytestmark = pytest.mark.gpu
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 720, "num_key_value_heads": 2}


def llama() -> Any:
    torch.manual_seed(0)
    return unsettled(transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, use_cache=False)))


@pytest.mark.parametrize("format", LAYOUTS)
def test_trained_exported_and_loaded(format: str, tmp_path: Path) -> None:
    model = llama().cuda()
    batch = tokens().cuda()
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True})
    run(input_ids=batch, labels=batch).loss.backward()
    exported = fp8compile.export(model, tmp_path / "gpu", format)
    ragged = [name for name in exported.kept if ".mlp." in name] if format == "block" else []  # 720 = 5 · 128 + 80
    assert len(ragged) == (3 if format == "block" else 0)
    assert len(exported.quantized) == 7 - len(ragged)
    fp8compile.export(llama(), tmp_path / "cpu", format, layers=["*"], skip=["lm_head"])
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()
    other = llama().cuda()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    fp8compile.load(other, tmp_path / "gpu")
    with torch.no_grad():
        assert sqnr(*(m.eval()(batch).logits for m in (model, other))) > 20
