"""benchmarks/micro/contracted_lengths.py without a GPU: what is filled up multiplies to the same."""

from __future__ import annotations

import torch

from benchmarks.micro import contracted_lengths
from benchmarks.micro.matmul import operand
from fp8compile.kernels.reference import markers


def test_tiny_run() -> None:
    rows = contracted_lengths.main(["--tiny", "--only", "SigLIP*"])
    assert [row.figures["k"] for row in rows] == [80, 96, 128, 128]
    assert all(row.figures[scales] > 0 for row in rows for scales in contracted_lengths.SCALES)


def test_zeros_behind_a_row_add_nothing() -> None:
    (a, of_a), (b, of_b) = operand(16, 80, "row", "cpu"), operand(32, 80, "row", "cpu")
    wide = [contracted_lengths._filled(x, 128) for x in (a, b)]
    assert [x.shape for x in wide] == [(16, 128), (32, 128)]
    plain, filled = (
        markers.scaled_mm(x, of_a, "row", y, of_b, "row", None, torch.float32) for x, y in ((a, b), tuple(wide))
    )
    torch.testing.assert_close(plain, filled)
