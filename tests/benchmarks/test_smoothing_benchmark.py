"""What benchmarks/training/smoothing.py emulates: that smoothing is exact by itself, and what docs/adaptive.md says of
it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training import smoothing


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_smoothing_changes_no_bit_in_bf16(share):
    for _, x, w, _ in smoothing.cases(32, 256, 16):
        s = smoothing.smoothing(x, w, share)
        for changed, back, original in ((x / s, s, x), (w * s, 1 / s, w)):
            assert torch.equal(changed, changed.bfloat16().float())
            assert torch.equal(changed * back, original)


def test_where_groups_do_and_where_smoothing_does():
    """Others than the outlier, in dB; bounds lie between what the page shows of either side."""
    found = {name: smoothing.measure(x, w, outliers) for name, x, w, outliers in smoothing.cases(128, 1024, 64)}

    def others(case: str, cast: str) -> float:
        return found[case][cast][1]

    for case in found:
        assert others(case, "half, row × tensor") > 27  # E4M3 of normal numbers: 31 dB each, two of them
    for kind in ("ignored", "shrunk", "equal"):
        assert others(f"1e+04, all tokens, {kind}", "group × group") > 28
        assert others(f"1e+06, all tokens, {kind}", "group × group") < 22
        assert others(f"1e+06, all tokens, {kind}", "row × tensor") < 15
    assert others("1e+06, all tokens, ignored", "smooth, row × tensor") > 27
    assert others("1e+06, all tokens, equal", "smooth, row × tensor") < 5
