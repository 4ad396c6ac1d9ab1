"""The benchmark of tensor parallelism without a GPU: it runs, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import printed_by

from benchmarks.distributed import tensor_parallel

# Of 2 × 32 tokens of 64 elements a rank receives the other's half. In a block that happens to the inputs of attention
# and feed-forward, and to the gradients of their outputs.
ROWS, COLUMNS, GATHERS = 2 * 32 // 2, 64, 2
BF16 = ROWS * COLUMNS * 2
BY_TENSOR = ROWS * COLUMNS + 4  # and the other rank's amax
BY_ROWS = ROWS * (COLUMNS + 4)  # and an amax for each row
BYTES = {
    "bf16": GATHERS * (BF16 + BF16),
    "ours mixed wire=exact": GATHERS * (BF16 + BY_TENSOR),
    "ours mixed wire=fp8": GATHERS * (BY_ROWS + BY_TENSOR),
}


@pytest.mark.slow
def test_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--tiny", "--blocks", "1", "--json", str(file), "--only", ",".join([*BYTES, "torchao*"])]
    text = printed_by(tensor_parallel.main, arguments)
    figures = json.loads(file.read_text())
    assert (figures["ranks"], figures["device"], figures["size"]["length"]) == (2, "cpu", 32)
    rows = {row["name"]: row for row in figures["rows"]}
    torchao = rows.pop("torchao tensorwise")["note"]
    assert torchao == "torchao is not installed" or "Invalid scalar type" in torchao  # gloo gathers no FP8
    assert {name: round(row["gather_mib"] * 2**20) for name, row in rows.items()} == BYTES
    for name, row in rows.items():
        assert row["note"] == ""
        assert name in text
        assert abs(row["loss"] - rows["bf16"]["loss"]) < 0.01
        # two operands rounded to E4M3, 2⁻⁴ / √3 of an element at most, before this gradient and once more in it
        assert 0.02 < row["gradient_error"] < 0.15 or name == "bf16"
    assert rows["bf16"]["gradient_error"] == 0
    rounded, exact = (rows[f"ours mixed wire={wire}"] for wire in ("fp8", "exact"))
    assert rounded["loss"] == exact["loss"]  # only gradients of weights read rounded activations
    assert rounded["gradient_error"] != exact["gradient_error"]
