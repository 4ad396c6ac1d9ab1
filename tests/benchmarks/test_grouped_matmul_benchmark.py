"""benchmarks/micro/grouped_matmul.py without a GPU: its groups, its shapes, and that every way to multiply is there."""

from __future__ import annotations

import pytest

from benchmarks.micro import grouped_matmul


@pytest.mark.parametrize(("rows", "experts"), [(96, 4), (32768, 8), (131072, 128)])
def test_groups_hold_all_rows(rows: int, experts: int) -> None:
    even, skewed, each = (grouped_matmul.sizes(rows, experts, how) for how in ("even", "skewed", "16 each"))
    assert even == each == [rows // experts] * experts
    assert sum(skewed) == rows
    assert len(skewed) == experts
    assert skewed[-1] == 0
    assert skewed[0] == pytest.approx(2 * skewed[1], abs=2)


def test_every_expert_gets_as_many_as_a_row_says() -> None:
    mixtral = grouped_matmul.MODELS["Mixtral 8x7B"]
    rows = {how: grouped_matmul.routed(mixtral, how) for how in grouped_matmul.HOWS}
    assert rows["even"] == rows["skewed"] == rows["4096 each"] == 2 * 16384
    assert rows["16 each"] == 8 * 16


def test_tiny_run() -> None:
    rows = grouped_matmul.main(["--tiny", "--only", "Mixtral*", "--systems", "gate+up*"])
    assert [row.system for row in rows] == [name for name in grouped_matmul.SYSTEMS if name.startswith("gate+up")]
    found = [tuple(row.figures[size] for size in ("m", "n", "k", "experts")) for row in rows]
    hows = len(grouped_matmul.HOWS)
    assert found == [(96, 96, 64, 4)] * hows + [(96, 64, 96, 4)] * 2 * hows
    for row in rows:
        casts = ("cast", "cast alone", "by columns", "by columns alone") if "grad_weight" in row.system else ()
        assert all(row.figures[name] > 0 for name in ("BF16", "FP8", "FP8, fast", "dense", "of_dense", *casts))
