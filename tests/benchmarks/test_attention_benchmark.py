"""benchmarks/micro/attention.py without a GPU: its forward in Triton, against torch's, and its table."""

from __future__ import annotations

import interpreter
import pytest
import torch

from benchmarks.micro import attention


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tile", [(32, 32, 4, 1), (64, 32, 4, 1)])
def test_the_forward_is_causal_attention_of_groups(tile, fp8):
    interpreter.prepare()
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 128, 32, generator=g).half() for heads in (4, 2, 2))
    right = attention.by_torch(q.float(), k.float(), v.float())
    out = torch.full((2, 4, 128, 32), torch.nan, dtype=torch.bfloat16)
    if fp8:
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v.transpose(-1, -2).contiguous()))
    attention.attend(q, k, v, tile, out)
    assert (out.float() - right).norm() / right.norm() < (0.07 if fp8 else 0.01)


def test_tiles_cover_what_they_mask():
    """A tile of queries begins where a tile of keys does, or keys would be read twice."""
    assert all(rows % keys == 0 for rows, keys, _, _ in attention.TILES)


def test_table(capsys):
    rows = attention.main(["--tiny", "--only", "2*", "--systems", "cuDNN"])
    assert [(row.model, row.system) for row in rows] == [("2 × 8192", "cuDNN")]
    assert "forward, ms" in capsys.readouterr().out


def test_a_tile_that_is_fast_and_wrong_is_not_taken():
    tried = [(1.0, 0.5, (64,)), (1.5, float("nan"), (128,)), (3.0, 0.01, (64,)), (2.0, 0.05, (128,))]
    assert attention.fastest(tried) == (2.0, 0.05, (128,))
    with pytest.raises(RuntimeError, match="no tile gives what cuDNN does"):
        attention.fastest(tried[:2])
