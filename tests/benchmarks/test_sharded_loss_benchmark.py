"""The benchmark of losses under FSDP2 without a GPU: two ranks train as one does, and table and file agree."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import pytest
from ranks import printed_by

from benchmarks.distributed import sharded_loss as benchmark
from benchmarks.distributed import sharded_loss_report as shown

TEXT = Path(asyncio.__file__).parent  # that no change of this project changes
STEPS, BATCH = 12, 8
LAST = STEPS // 6
OURS, GATHER, STATES = "ours", "ours + FP8 gather", "ours + FP8 gather, 8-bit states"


def assert_table(text: str, rows: dict[tuple[int, str], Any]) -> None:
    """Every row of the file is in the table, with these figures."""
    for (ranks, system), row in rows.items():
        losses, alone = row["losses"], rows[1, "BF16" if system == "BF16" else OURS]
        result = mean(losses[-LAST:])
        shown = [f"{x:.4f}" for x in (losses[0], mean(losses[:10]), mean(losses[-10:]), result)]
        if ranks == 2:
            mark = "" if (1, system) in rows else "*"
            shown.append(f"{result / mean(alone['losses'][-LAST:]) - 1:+.2%}{mark}")
            shown.append(f"{result / mean(rows[1, 'BF16']['losses'][-LAST:]) - 1:+.2%}")
        line = re.search(rf"^{ranks} +{re.escape(system)}  +(\d.*)$", text, re.M)
        assert line, (ranks, system, text)
        assert line[1].split()[: len(shown)] == shown


def remembering(arguments: list[str]) -> None:
    """The benchmark, where a system finds what another has compiled of the same blocks by the same options."""
    with mock.patch.object(benchmark, "forget"):
        benchmark.main(arguments)


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "losses.json", tmp_path / "losses.svg"
    common = ("--tiny", "--steps", str(STEPS), "--text", str(TEXT), "--json", str(file))
    text = printed_by(remembering, [*common, "--picture", str(picture)])
    rows = {(row["ranks"], row["system"]): row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == [(1, "BF16"), (1, OURS), (2, "BF16"), (2, OURS), (2, GATHER), (2, STATES)]
    for (ranks, system), row in rows.items():
        losses, same = row["losses"], rows[1, "BF16" if system == "BF16" else OURS]
        assert row["note"] == ""
        assert len(losses) == STEPS
        assert row["batch"] * ranks == BATCH  # sequences of a rank: the slices are the global batch
        assert mean(losses[-LAST:]) < losses[0] - 1
        # equal weights and data, so what differs at first is the order of additions; or gathered weights' other scales,
        # whose roundings move a loss by no more than FP8's do (two to five times 1e-4 of it)
        gathers = system in {GATHER, STATES}
        assert losses[0] == pytest.approx(same["losses"][0], rel=1e-3 if gathers else 1e-5)
        assert losses == pytest.approx(same["losses"], rel=0.01)
        assert (row["fp8_matmuls"] > 0) == (system != "BF16")
    assert rows[2, GATHER]["losses"] != rows[2, STATES]["losses"] != rows[2, OURS]["losses"]
    # two moments: 8 bytes an element, or 2.125 in 8 bits; vectors and steps stay as they are
    assert 0.26 < rows[2, STATES]["states_mib"] / rows[2, GATHER]["states_mib"] < 0.28
    assert_table(text, rows)
    for again in ("--json", str(file), "--report"), common:  # the latter finds nothing left to train
        benchmark.main(again)
        assert_table(capsys.readouterr().out, rows)
    assert picture.read_text().count("<polyline") == 6


def test_rows_are_merged_and_other_settings_refused(tmp_path: Path) -> None:
    file, settings = tmp_path / "losses.json", {"size": [1], "text": "a"}
    failed = shown.Row(2, "BF16", "cpu", note="failed: ValueError: x")
    for row in (failed, shown.Row(2, "ours", "cpu", losses=[2.0]), shown.Row(1, "ours", "cpu", losses=[1.6])):
        shown.add(row, file, settings)
    text = shown.table(shown.read(file, settings))
    assert re.search(r"^2 +BF16 +failed: ValueError: x$", text, re.M)
    assert re.search(r"^2 +ours +2.0000 +2.0000 +\+25.00% +- ", text, re.M)
    shown.add(shown.Row(2, "BF16", "cpu", losses=[3.0]), file, settings)
    assert [(r.ranks, r.system, r.losses) for r in shown.read(file)] == [
        (1, "ours", [1.6]), (2, "BF16", [3.0]), (2, "ours", [2.0])
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"other settings \(size\)"):
        shown.read(file, {**settings, "size": [2]})


def test_nothing_is_begun_that_may_not_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ("--tiny", "--ranks", "1", "--seconds", "-1", "--text", str(TEXT))
    benchmark.main([*given, "--json", str(tmp_path / "losses.json")])
    text = capfd.readouterr().out
    assert "1 × BF16: left out" in text
    assert "1 × ours: left out" in text
    assert not (tmp_path / "losses.json").exists()
