"""benchmarks/training/convergence.py on a CPU: runs that are interrupted end as others do; the table says what is in
them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

import fp8compile
from benchmarks.training import convergence as benchmark
from benchmarks.training import convergence_report as shown
from benchmarks.training import intervals

STEPS = 6
TEXT = Path(asyncio.__file__).parent  # that no change of this project changes, and is soon read
EVALUATIONS = 4  # of six, then a run is interrupted
GIVEN = ["--tiny", "--steps", str(STEPS), "--seeds", "1", "--text", str(TEXT)]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """One layer, evaluations of one batch, at the end of two; the last two steps' weights are averaged."""
    tiny = benchmark.SIZES["tiny"]
    small = replace(tiny, model=replace(tiny.model, n_layers=1), held_out_batches=1)
    with (
        mock.patch.dict(benchmark.SIZES, tiny=small),
        mock.patch.multiple(benchmark, FINAL=2, LAST_SHARE=1 / 3, READING=1),
    ):
        yield


NAME = "O3 mixed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, _small: None) -> tuple[Path, Path]:
    """One of two configurations' runs, none of which was interrupted; and one where the second was, when time was over.

    The latter finds what the former has compiled.
    """
    torch.set_num_threads(1)
    whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    benchmark.main([*GIVEN, "--configurations", "BF16", NAME, "--out", str(whole)])
    ticks = iter([0.0, 0.0, *[0.0] * EVALUATIONS, *[1e9] * 1000])
    with (
        mock.patch.object(torch.compiler, "reset"),
        mock.patch.object(benchmark.time, "monotonic", ticks.__next__),
    ):
        benchmark.main([*GIVEN, "--configurations", NAME, "--out", str(parts), "--minutes", "1"])
    return whole, parts


def made(name: str, seed: int, losses: list[float], second: float, readings: list[float] | None = None) -> Any:
    evaluations = [(10 * (i + 1), loss) for i, loss in enumerate(losses)]
    return shown.Run(name, seed, 10 * len(losses), evaluations, readings or [], [second])


def test_an_interrupted_run_ends_like_another(capsys, folders):
    whole, parts = folders
    checkpoint = parts / "checkpoints" / "interrupted.pt"
    assert checkpoint.exists()
    (begun,) = shown.read_runs(parts)
    assert len(begun.evaluations) == EVALUATIONS
    assert not begun.finished
    benchmark.main([*GIVEN, "--configurations", NAME, "--out", str(parts)])
    assert not checkpoint.exists()
    assert "all runs done" in capsys.readouterr().out
    (parts,), (run,) = ([run for run in shown.read_runs(folder) if run.name == NAME] for folder in (parts, whole))
    assert parts.finished
    assert (parts.evaluations, parts.readings, parts.norms) == (run.evaluations, run.readings, run.norms)  # to the bit
    assert parts.final == run.final
    assert set(run.final) == set(shown.MEASURES) - {shown.SMOOTHED}
    assert len(run.evaluations) == STEPS
    assert run.fp8_matmuls > 0
    assert run.evaluations[-1][1] < run.evaluations[0][1] - 0.3  # it learns


def test_configurations_run_and_are_reported(folders, capsys):
    whole, _ = folders
    arguments = [*GIVEN, "--out", str(whole)]
    rows = json.loads((whole / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["BF16", NAME]
    assert 0 < abs(rows[1]["gap"]["mean"]) < 0.02  # six steps: hardly anything could differ; but they are not the same
    for picture in ("loss.svg", "norms.svg"):
        drawn = ElementTree.fromstring((whole / picture).read_text())
        assert sum(element.tag.endswith("polyline") for element in drawn) == 2
    with pytest.raises(SystemExit, match=r"holds runs of other settings \(size\)"):
        benchmark.main([*arguments, "--steps", "7"])
    capsys.readouterr()
    benchmark.main([*arguments, "--report"])
    assert "O3 mixed                     1" in capsys.readouterr().out


def test_the_first_and_the_last_block_stay_bf16() -> None:
    tiny = benchmark.SIZES["tiny"]
    size = replace(tiny, model=replace(tiny.model, n_layers=3))
    corpus = benchmark.load_corpus(TEXT, size.seq)
    settings = benchmark.Settings(size, "cpu", "all", "fp32", "eager", "")
    trainer = benchmark.Trainer(settings, corpus, shown.Run("O3 ends in BF16", 0, STEPS))
    trainer.loss(corpus.train, trainer.starts[0]).backward()
    matmuls = [row for plan in fp8compile.compiles() if plan.graph == "training" for row in plan.matmuls]
    in_fp8 = [row.path for row in matmuls if row.decision == "fp8"]
    left = [row.path for row in matmuls if row.decision == "bf16"]
    assert in_fp8
    assert all("blocks.1." in path for path in in_fp8)
    assert {block for block in "012" if any(f"blocks.{block}." in path for path in left)} == {"0", "2"}


def test_bf16_parameters_have_masters(tmp_path):
    settings = benchmark.Settings(benchmark.SIZES["tiny"], "cpu", "all", "bf16", "eager", "")
    corpus = benchmark.load_corpus(TEXT, 64)
    trainer = benchmark.Trainer(settings, corpus, shown.Run("O2 blockwise", 0, 60))
    trainer.step = trainer.model  # its gradients have the same dtype, and what updates it is asked about
    losses, norms = trainer.train(2)
    assert len(losses) == len(norms) == 2
    p = trainer.model.blocks[0].attention.q.weight
    assert p.dtype == benchmark.torch.bfloat16
    assert trainer.opt.state[p]["exp_avg"].low is not None


def test_the_last_weights_are_averaged_and_evaluated():
    settings = benchmark.Settings(replace(benchmark.SIZES["tiny"], steps=6), "cpu", "all", "fp32", "eager", "")
    corpus = benchmark.load_corpus(TEXT, 64)
    trainer = benchmark.Trainer(settings, corpus, shown.Run("BF16", 0, 6))
    kept = []
    for _ in range(6):
        _, (norm,) = trainer.train(1)
        kept.append([p.detach().clone() for p in trainer.model.parameters()])
        assert norm > 0
    assert trainer.averaged is not None
    for mean, *weights in zip(trainer.averaged.module.parameters(), *kept[-2:], strict=True):
        torch.testing.assert_close(mean, torch.stack(weights).mean(0))
    found = trainer.final()
    starts = benchmark.even_starts(corpus.held_out, 2, 8, 64)
    for measure, weights in (
        (shown.LAST, kept[-1]),
        (shown.AVERAGED, [sum(p) / 2 for p in zip(*kept[-2:], strict=True)]),
    ):
        with torch.no_grad():
            for p, value in zip(trainer.model.parameters(), weights, strict=True):
                p.copy_(value)
            losses = [trainer.loss(corpus.held_out, batch, trainer.model).item() for batch in starts]
        assert found[measure + shown.IN_BF16] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert found[shown.LAST] != found[shown.AVERAGED]


def test_pairs_that_a_claim_takes():
    """A deviation of 0.2 % has an interval of ± t · 0.2 % / √n: 0.1 % from 18 on (t 2.110), not with 17 (2.120)."""
    assert 2.110 * 0.002 / 18**0.5 < shown.CLAIM < 2.120 * 0.002 / 17**0.5
    assert intervals.pairs_for(0.002) == 18
    assert intervals.pairs_for(0.0) == 2


def test_gaps_are_told_by_measure():
    runs = [made(name, seed, [2.0] * 3, 1.0) for name in ("BF16", "O3 mixed") for seed in (0, 1)]
    for run in runs:
        run.final = {shown.LAST: 1.0, shown.AVERAGED: 1.01 + 0.01 * run.seed if run.name != "BF16" else 1.0}
    (_, row) = shown.summary(runs)
    assert set(row["gaps"]) == {shown.SMOOTHED, shown.LAST, shown.AVERAGED}
    assert row["gap"]["mean"] == row["gaps"][shown.AVERAGED]["mean"] == pytest.approx(0.015)
    assert row["gaps"][shown.AVERAGED]["deviation"] == pytest.approx(0.01 / math.sqrt(2))
    assert row["gaps"][shown.LAST]["mean"] == 0.0
    assert "O3 mixed, averaged" in shown.noise_table([row])
    runs[0].final = {}  # of an older run: only what all pairs have is compared
    assert set(shown.summary(runs)[1]["gaps"]) == {shown.SMOOTHED}


def test_runs_that_are_not_finished_are_compared_at_a_step_of_both():
    def run(name: str, seed: int, losses: list[float], steps: int = 40) -> shown.Run:
        evaluations = [(10 * (i + 1), loss) for i, loss in enumerate(losses)]
        return shown.Run(name, seed, steps, evaluations, readings=[2.0, 1.0, 1.5], seconds=[0.5])

    runs = [run("BF16", 0, [4.0, 3.0, 2.0]), run("O3 mixed", 0, [4.0, 3.3]), run("O3 mixed", 1, [1.0])]
    _, line = shown.running_table(runs).splitlines()  # seed 1 has no BF16 beside it
    assert line.split() == ["O3", "mixed", "0", "20", "of", "40", "3.6500", "3.5000", "+4.29%", "500.0", "1", "→", "1"]
    ended = [run("BF16", 0, [4.0, 3.0], 20), run("O3 mixed", 0, [4.0, 3.3], 20)]
    assert shown.running_table(ended) == ""


def test_intervals_are_student_s():
    found = intervals.Interval.of([1.0, 2.0, 4.0])
    # mean 7/3, deviation √(7/3), times 4.303 / √3
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.303 * math.sqrt(7 / 3) / math.sqrt(3))
    assert intervals.Interval.of([1.0]).half is None


def test_the_summary_compares_equal_seeds_and_equal_losses():
    runs = [
        made("BF16", 0, [4.0, 2.0, 1.0, 1.0, 1.0], 2.0),
        made("BF16", 1, [4.0, 2.0, 1.5, 1.5, 1.5], 2.0),
        made("O2 mixed", 0, [4.0, 2.0, 1.1, 1.1, 1.1], 1.0),
        made("O2 mixed", 1, [4.0, 2.0, 1.8, 1.8, 1.8], 1.0, [3.0, 2.0, 2.5, 1.9, 1.8]),
        made("O3 mixed", 0, [4.0, 2.0], 1.0),
    ]
    runs[-1].steps = 50  # unfinished
    rows = {row["name"]: row for row in shown.summary(runs)}
    assert list(rows) == ["BF16", "O2 mixed"]
    assert rows["O2 mixed"]["gap"]["mean"] == pytest.approx((0.1 + 0.2) / 2)
    assert rows["O2 mixed"]["gap"]["half"] == pytest.approx(12.706 * math.sqrt(0.005) / math.sqrt(2))
    assert rows["O2 mixed"]["spikes"] == 1  # 2.5 after 2.0
    assert rows["BF16"]["equal_loss"] == pytest.approx(1.8)
    # smoothed: 4, 3, 7/3, 4/3, 1 → 1.8 between steps 30 and 40; 4, 3, 2.5, 5/3, 1.5 → likewise
    first, second = 30 + 10 * (7 / 3 - 1.8) / 1.0, 30 + 10 * (2.5 - 1.8) / (2.5 - 5 / 3)
    assert rows["BF16"]["time_to_equal_loss"] == pytest.approx(2.0 * (first + second) / 2)
    assert "BF16                         2  1.2500 ± 3.1765" in shown.table(list(rows.values()))


def test_a_run_that_was_not_timed_takes_the_time_of_its_configuration():
    untimed = made("BF16", 1, [4.0, 2.0, 1.0, 1.0, 1.0], 0.0)
    untimed.seconds = []
    runs = [made("BF16", 0, [4.0, 2.0, 1.0, 1.0, 1.0], 2.0), untimed]
    rows = shown.summary(runs)
    assert rows[0]["seconds_per_step"] == 2.0
    assert rows[0]["time_to_equal_loss"] == pytest.approx(2.0 * 50)
    assert "2000.0" in shown.table(rows)
    assert "seconds of training" in shown.picture([untimed, runs[0]])
    assert "steps of training" in shown.picture([untimed])
    alone = shown.summary([untimed])
    assert "nan" not in shown.table(alone)
    assert alone[0]["time_to_equal_loss"] is None


def test_runs_from_nudged_weights_stand_behind_their_configuration() -> None:
    names = ["O3 rowwise", "O3 mixed nudged 2", "output alone", "BF16 nudged", "O3 mixed", "BF16", "O3 mixed nudged"]
    assert shown.in_order(names) == [
        "BF16", "BF16 nudged", "O3 mixed", "O3 mixed nudged", "O3 mixed nudged 2", "O3 rowwise", "output alone"
    ]  # fmt: skip
    given = benchmark.parser().parse_args(["--configurations", "grad_input alone nudged 3", "BF16"])
    assert given.configurations == ["grad_input alone nudged 3", "BF16"]


def test_gaps_of_groups_share_one_deviation() -> None:
    losses = {
        ("BF16", 0): [1.0, 1.02],
        ("O3", 0): [1.05, 1.03, 1.01],
        ("BF16", 1): [2.0],
        ("O3", 1): [2.2],
        ("a", 0): [1.0],
    }
    deviation, gaps = intervals.gaps_of_groups(losses, "BF16")
    assert list(gaps) == ["O3", "a"]
    # of each about its mean: 1.01 and 1.03; three degrees of freedom
    squares = 2 * (0.01 / 1.01) ** 2 + 2 * (0.02 / 1.03) ** 2
    assert deviation == pytest.approx(math.sqrt(squares / 3))
    assert gaps["O3"].mean == pytest.approx((1.03 / 1.01 - 1 + 0.1) / 2)
    assert gaps["O3"].half == pytest.approx(3.182 * deviation * math.sqrt((1 / 3 + 1 / 2 + 1 + 1) / 4))
    assert gaps["a"].half == pytest.approx(3.182 * deviation * math.sqrt(1 + 1 / 2))
    with pytest.raises(ValueError, match="no group has two runs"):
        intervals.gaps_of_groups({("BF16", 0): [1.0], ("O3", 0): [1.1]}, "BF16")


def test_runs_from_nudged_weights_are_further_runs_of_their_configuration() -> None:
    alone = [made("BF16", 0, [1.0], 1.0), made("O3 mixed", 0, [1.1], 1.0)]
    assert shown.table_of_nudged_runs(alone) == ""
    lone = made("O2 mixed nudged", 0, [1.1], 1.0)
    assert shown.table_of_nudged_runs([alone[0], lone]) == ""  # nothing says how far runs come apart
    runs = [*alone, made("O3 mixed nudged", 0, [1.14], 1.0), made("BF16 nudged", 0, [1.02], 1.0)]
    for run in (runs[1], runs[2]):
        run.fp8_matmuls = 9
    lines = shown.table_of_nudged_runs(runs).splitlines()
    deviation = math.sqrt((2 * (0.01 / 1.01) ** 2 + 2 * (0.02 / 1.12) ** 2) / 2)
    assert lines[1].split() == ["O3", "mixed", "2", "+10.89%", "±", f"{4.303 * deviation:.2%}", f"{deviation:.2%}"]
    assert lines[2].split()[:6] == ["all", "with", "matmuls", "in", "FP8", "2"]


def test_an_unknown_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("O3 mixd", "O3 mixed nudged x", "nudged"):
        with pytest.raises(SystemExit):
            benchmark.main(["--configurations", "BF16", name])
        assert f"there is no configuration '{name}': BF16, BF16 nudged" in capsys.readouterr().err


def test_what_shares_the_gpu_keeps_no_times(tmp_path, capsys):
    benchmark.main([*GIVEN, "--steps", "2", "--out", str(tmp_path), "--configurations", "BF16", "--untimed"])
    assert "not timed" in capsys.readouterr().out
    (run,) = shown.read_runs(tmp_path)
    assert run.finished
    assert run.seconds == []


def test_a_diverged_run_is_said():
    bad = made("O2 mixed", 0, [4.0, math.nan], 1.0)
    bad.diverged = True
    rows = shown.summary([made("BF16", 0, [4.0, 2.0], 1.0), bad])
    assert (rows[1]["diverged"], rows[1]["gap"]) == (1, None)
    assert "1 diverged" in shown.table(rows)
