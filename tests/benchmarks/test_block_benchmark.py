"""benchmarks/training/block.py without a GPU: every system runs, and its gradients are what FP8's should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import peers
from benchmarks.training import block, blocks
from llama import LlamaConfig


class FeedForward(nn.Module):
    """A block without attention: every system compiles one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim)
        self.gate, self.up = (nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_tiny_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TINY", replace(blocks.TINY, n_layers=1))
    monkeypatch.setattr(blocks, "Block", FeedForward)
    file = tmp_path / "figures.json"
    rows = {r.system: r for r in block.main(["--tiny", "--only", "Llama-8B", "--json", str(file)])}
    assert list(rows) == [system.name for system in block.SYSTEMS]
    assert all(r.note == "torchao is not installed" for r in rows.values() if not r.figures)
    ours, saved_in_bf16 = rows["fp8compile"], rows["fp8compile + BF16 saved"]
    assert 0.05 < ours.get("error") < 0.2  # E4M3 has 3 bits: 3 % of each value, more where small ones are lost
    assert ours.get("cosine") > 0.98
    assert ours.get("predicted_gib") < saved_in_bf16.get("predicted_gib")
    assert ours.get("in_fp8") == f"{2 * 3} of {2 * 3} matmuls"  # gate and up are merged
    assert rows["BF16 eager"].get("error") == 0
    assert len(json.loads(file.read_text())["runs"][0]["rows"]) == len(rows)


@pytest.mark.parametrize(("name", "millions"), [("Llama-8B", 436), ("Llama-1B", 122), ("Llama-13B", 634)])
def test_sizes(name: str, millions: int) -> None:
    size = next(s for s in blocks.SIZES if s.name == name)
    with torch.device("meta"):
        count = sum(p.numel() for p in size.build().parameters())
    assert round(count / 1e6) == millions


def test_torchao_leaves_heads_and_odd_sizes() -> None:
    assert peers.converts(nn.Linear(32, 64), "layers.0.mlp.up")
    assert not peers.converts(nn.Linear(32, 64), "model.lm_head")
    assert not peers.converts(nn.Linear(32, 10), "layers.0.mlp.up")
    assert not peers.converts(nn.LayerNorm(32), "norm")
