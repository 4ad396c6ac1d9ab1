"""benchmarks/micro/chunked_loss.py without a GPU: what a head and its loss take is what the equations say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro import chunked_loss

M, K, N = SHAPE = 4096, 512, 32000


@pytest.mark.parametrize("rows", [256, 2048])
def test_chunks_take_the_sum_and_one_of_them(rows: int) -> None:
    """At the end of forward the FP32 sum, a chunk of BF16 logits and what is M × K; or the sum twice in backward, where
    nothing is fused when it is counted."""
    found = chunked_loss.counted(SHAPE, rows) * chunked_loss.GIB
    forward, backward = 4 * N * K + 2 * N * rows, 8 * N * K
    small = M * K * 4 * 4
    assert max(forward, backward) < found < max(forward, backward) + small


def test_whole_logits_take_more_than_twice_themselves() -> None:
    assert chunked_loss.counted(SHAPE, False) * chunked_loss.GIB > 2 * 2 * M * N


def test_tiny_heads(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    rows = chunked_loss.main(
        ["--tiny", "--only", "*GPT*", "--systems", "BF16 compile,Liger,*FP8? chunks of 1024", "--json", str(file)]
    )
    assert [row.system for row in rows] == ["BF16 compile", "Liger", "FP8, chunks of 1024"]
    assert [row.note for row in rows] == ["", "not installed", ""]
    bf16, _, fp8 = rows
    for error in ("error_x", "error_weight"):
        assert 0.001 < bf16.get(error) < 0.006  # 2⁻⁹ of each number at most, once or twice
        assert 0.02 < fp8.get(error) < 0.08
    assert len(json.loads(file.read_text())["runs"][0]["rows"]) == len(rows)
