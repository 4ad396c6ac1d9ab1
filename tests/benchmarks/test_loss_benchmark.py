"""benchmarks/micro/chunked_loss.py without a GPU: what a head and its loss take is what the equations say."""

from __future__ import annotations

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
