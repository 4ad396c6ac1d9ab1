"""A row of the field suite on a GPU: measured in processes of its own, timed alone, added to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.field import suite as field
from benchmarks.field.steps import OURS
from benchmarks.harness.peers import BASELINE

pytestmark = pytest.mark.gpu


def test_rows_are_measured_and_right(tmp_path: Path) -> None:
    file = tmp_path / "field.json"
    rows = field.main(["--only", "GAN,Distillation", "--jobs", "2", "--json", str(file)])
    assert [row.system for row in rows] == [BASELINE.name, OURS.name] * 2
    for row in rows:
        assert row.note == ""
        assert row.get("ms") > 0
        assert row.get("first_peak_gib") + 2**-10 >= row.get("peak_gib") > 0  # a table of addresses comes later
    assert [row.get("wrong") for row in rows[1::2]] == [[], []]
    assert field.measured(file) == {"GAN", "Distillation"}
