"""That benchmarks/micro/accumulation.py measures what it says, where sums are exact or known not to be."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro import accumulation


def test_sums_in_fp32_lose_next_to_nothing_beside_casts():
    results = accumulation.main(["--tiny"])
    assert {(r.data, r.k, r.fast) for r in results} == {
        (data, k, fast) for data in accumulation.DATA for k in accumulation.TINY_LENGTHS for fast in (False, True)
    }
    for r in results:
        assert 25 < r.cast < 55  # E4M3 of normal numbers: 31 dB each, two of them; sums of one sign lose less
        assert r.sum > 60
        assert r.all == pytest.approx(r.cast, abs=0.05)
        assert abs(r.shrunk) < 0.05


def test_sums_that_shrink_are_seen(monkeypatch):
    """A matmul that gives back 99 % of its sums: 40 dB below them, 1 % shrunk."""
    plain = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: 0.99 * plain(*a, **k))
    for r in accumulation.measure("all positive", 32, 256, "cpu"):
        assert r.sum == pytest.approx(40, abs=0.1)
        assert r.shrunk == pytest.approx(1, abs=0.02)
        assert r.all < r.cast
