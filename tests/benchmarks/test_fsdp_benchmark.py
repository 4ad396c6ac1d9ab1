"""The benchmark of FSDP2 without a GPU: it runs, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from ranks import printed_by

from benchmarks.distributed import fsdp, ranks_of_host


def remembering(arguments: list[str]) -> None:
    """The benchmark, where a system finds what another has compiled of the same blocks by the same options."""
    with mock.patch.object(ranks_of_host, "forget"):
        fsdp.main(arguments)


def test_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    text = printed_by(remembering, ["--tiny", "--more", "--json", str(file)])
    figures = json.loads(file.read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    assert len(rows) == 7
    assert figures["ranks"] == 2
    ran = [row for row in rows.values() if not row["note"]]
    assert {"bf16", "ours", "ours + FP8 gather"} <= {row["name"] for row in ran}
    assert all(row["note"] == "torchao is not installed" for row in rows.values() if row not in ran)
    for row in ran:
        assert abs(row["loss"] - rows["bf16"]["loss"]) < 0.01
        assert row["name"] in text
    # (2 · 64 · 64 + 2 · 64 · 32 + 3 · 64 · 128) elements of linears, half of them received, twice a step
    linears = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    saved = rows["bf16"]["gather_mib"] - rows["ours + FP8 gather"]["gather_mib"]
    assert saved * 2**20 == linears / 2 * 2
    assert rows["ours"]["gather_mib"] == rows["bf16"]["gather_mib"]
    compressed = rows["ours + FP8 gather, FP8 gradients"]["reduce_mib"] / rows["bf16"]["reduce_mib"]
    assert 0.25 < compressed < 0.27  # of FP32: a byte, and 1/32 for scales
