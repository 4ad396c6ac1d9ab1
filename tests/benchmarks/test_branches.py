"""benchmarks/training/branches.py on a CPU: a branch in BF16 is the training that it leaves; others have their part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_convergence import TEXT

import fp8compile
from benchmarks.training import branches as benchmark
from benchmarks.training import convergence
from benchmarks.training.convergence_report import IN_BF16, LAST, NUDGED, OURS, PARTS, PARTS_OF_O3, STATES, Run
from corpus import load_corpus

STEPS, AT = 6, 3
GIVEN = ["--tiny", "--at", "0.5", "--select", "all", "--text", str(TEXT)]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    torch.set_num_threads(1)
    tiny = convergence.SIZES["tiny"]
    small = replace(tiny, model=replace(tiny.model, n_layers=1), held_out_batches=1, steps=STEPS)
    with (
        mock.patch.dict(convergence.SIZES, tiny=small),
        mock.patch.multiple(convergence, FINAL=2, LAST_SHARE=0.0),
        mock.patch.object(benchmark, "CHUNK", 2),
    ):
        yield


def whole() -> tuple[list[float], dict[str, float]]:
    """Losses of a training in BF16 that nothing branches off, and those of its last weights."""
    size = convergence.SIZES["tiny"]
    corpus = load_corpus(TEXT, size.seq)
    settings = convergence.Settings(size, "cpu", "all", "fp32", "eager", "")
    trainer = convergence.Trainer(settings, corpus, Run("BF16", 0, STEPS))
    losses, _ = trainer.train(STEPS)
    return torch.stack(losses).tolist(), trainer.last()


def test_a_branch_in_bf16_is_the_rest_of_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the clock stopped what it grows on."""
    ticks = iter([0.0, 0.0, *[1e9] * 1000])  # when it began, and one look
    with mock.patch.object(benchmark.time, "monotonic", ticks.__next__):
        benchmark.main([*GIVEN, "--out", str(tmp_path), "--branches", "BF16", "--minutes", "1"])
    assert not list(tmp_path.glob("*-seed0.json"))
    state = torch.load(tmp_path / "checkpoints" / "trunk-seed0.begun", weights_only=False)
    assert 0 < state["done"] < AT
    benchmark.main([*GIVEN, "--out", str(tmp_path), "--branches", "BF16", NUDGED])
    base, nudged = (json.loads((tmp_path / f"{name}-seed0.json").read_text()) for name in ("BF16", "BF16-nudged"))
    losses, held_out = whole()
    assert (base["at"], base["losses"], base["held_out"]) == (AT, losses[AT:], held_out)
    assert nudged["losses"] != base["losses"]
    assert nudged["losses"] == pytest.approx(base["losses"], rel=1e-3)
    assert "BF16 nudged" in capsys.readouterr().out
    benchmark.main([*GIVEN, "--out", str(tmp_path), "--branches", "BF16"])  # there is nothing left to do
    assert json.loads((tmp_path / "BF16-seed0.json").read_text()) == base


def test_a_nudge_changes_every_weight_a_little_and_nothing_else() -> None:
    size = convergence.SIZES["tiny"]
    corpus = load_corpus(TEXT, size.seq)
    settings = convergence.Settings(size, "cpu", "all", "fp32", "eager", "")
    names = ("BF16", NUDGED, f"{NUDGED} 2")
    base, *all_nudged = (convergence.Trainer(settings, corpus, Run(name, 0, STEPS)) for name in names)
    for nudged in all_nudged:
        assert torch.equal(base.starts, nudged.starts)
        for a, b in zip(base.model.parameters(), nudged.model.parameters(), strict=True):
            assert (b / a - 1).abs().max() < 1e-3
            assert 5e-5 < (b / a - 1).std() < 2e-4
    one, two = all_nudged
    assert not any(map(torch.equal, one.model.parameters(), two.model.parameters()))


@pytest.mark.parametrize("name", [*PARTS, STATES, "output + grad_weight + saved"])
def test_each_branch_has_its_part_alone(tmp_path: Path, name: str) -> None:
    small = {name: {**OURS[name], "save_min_bytes": 0}} if name in OURS else {}
    with mock.patch.dict(OURS, small):
        benchmark.main([*GIVEN, "--out", str(tmp_path), "--branches", "BF16", name])
    base, found = (json.loads((tmp_path / f"{n.replace(' ', '-')}-seed0.json").read_text()) for n in ("BF16", name))
    trained = [plan for plan in fp8compile.compiles() if plan.graph == "training"]
    matmuls = {row.role for plan in trained for row in plan.matmuls if row.decision == "fp8"}
    saved = any("e4m3" in row.form for plan in trained for row in plan.saved)
    parts = set(benchmark.PARTS_IN[name])
    assert matmuls == parts & {"output", "grad_input", "grad_weight"}
    assert saved == ("saved" in parts)
    assert (found["fp8_matmuls"] > 0) == bool(matmuls)
    assert found["losses"] != base["losses"]
    assert found["losses"][0] == pytest.approx(base["losses"][0], rel=1e-3)  # from the same weights, on the same batch
    assert found["losses"] == pytest.approx(base["losses"], rel=0.02)


def test_gaps_are_of_parts_of_a_branch_and_of_the_last_weights(tmp_path: Path) -> None:
    def branch(name: str, seed: int, losses: list[float], held_out: float, in_bf16: float) -> benchmark.Branch:
        return benchmark.Branch(name, seed, 3, losses, {LAST: held_out, LAST + IN_BF16: in_bf16}, 0.01 + seed, 0, 0)

    base = branch("BF16", 0, [9.0, 9.0, 2.0, 4.0], 1.0, 2.0)
    other = branch("O3 mixed", 0, [9.9, 1.0, 2.2, 4.0], 1.01, 2.04)
    found = benchmark.gaps(other, base)
    assert found == pytest.approx({"at first": 0.1, "training": 0.05, "as run": 0.01, "weights": 0.02})
    rest = [branch("BF16", 1, [1.0] * 4, 1.0, 1.0), branch("O3 mixed", 1, [1.0] * 4, 1.03, 1.0)]
    alone = branch("O3 mixed", 2, [1.0] * 4, 1.0, 1.0)  # has no BF16 beside it
    for each in (base, other, *rest, alone):
        file = tmp_path / f"{each.name.replace(' ', '-')}-seed{each.seed}.json"
        file.write_text(json.dumps(vars(each)))
    (tmp_path / "settings.json").write_text("{}")
    lines = benchmark.report(tmp_path).splitlines()
    assert lines[2].split()[:4] == ["O3", "mixed", "2", "510.0"]
    assert "+2.000%" in lines[2]
    (row,) = [r for r in json.loads((tmp_path / "results.json").read_text())["rows"] if r["name"] == "O3 mixed"]
    assert row["seeds"] == [0, 1]
    half = 12.706 * math.sqrt(2) * 0.01 / math.sqrt(2)
    assert row["gaps"]["as run"] == pytest.approx({"mean": 0.02, "half": half})


def test_each_part_adds_what_half_of_the_combinations_say() -> None:
    worth = dict(zip(PARTS_OF_O3, (0.01, -0.02, 0.03, 0.0, 0.05), strict=True))

    def branch(name: str) -> benchmark.Branch:
        loss = 2.0 * (1 + sum(worth[part] for part in benchmark.PARTS_IN[name]))
        return benchmark.Branch(name, 0, 3, [loss] * 8, {LAST: loss, LAST + IN_BF16: loss}, 0.01, 0, 0)

    branches = [branch(name) for name in benchmark.COMBINED]
    assert len(branches) == 17
    found = benchmark.effects(branches, {0: branches[0]})
    for part, value in {**worth, benchmark.TOGETHER: sum(worth.values())}.items():
        for interval in found[part].values():
            assert interval.mean == pytest.approx(value, abs=1e-9)
            assert interval.half == pytest.approx(0, abs=1e-9)
    assert benchmark.effects(branches[:6], {0: branches[0]}) == {}  # as many unknowns as branches


def test_the_interval_of_a_part_is_that_of_its_coefficient() -> None:
    """Beside the textbook: half of 16 branches have a part, so its error is 2 / √16 of a branch's."""
    torch.manual_seed(0)
    noise = 0.01 * torch.randn(16, dtype=torch.float64)

    def branch(name: str, gap: float) -> benchmark.Branch:
        return benchmark.Branch(name, 0, 3, [1 + gap] * 8, {LAST: 1 + gap, LAST + IN_BF16: 1 + gap}, 0.01, 0, 0)

    branches = [branch(name, gap) for name, gap in zip(benchmark.COMBINED[1:], noise.tolist(), strict=True)]
    found = benchmark.effects(branches, {0: branch("BF16", 0.0)})
    signs = torch.tensor([[1.0 if part in benchmark.PARTS_IN[b.name] else -1.0 for part in PARTS_OF_O3]
                          for b in branches], dtype=torch.float64)  # fmt: skip
    assert torch.equal(signs.T @ signs, 16 * torch.eye(5, dtype=torch.float64))  # what makes least squares this simple
    coefficients = signs.T @ noise / 16
    rest = noise - noise.mean() - signs @ coefficients
    error = 2 * (rest.square().sum() / 10).sqrt().item() / 4
    for part, coefficient in zip(PARTS_OF_O3, coefficients.tolist(), strict=True):
        assert found[part]["training"].mean == pytest.approx(2 * coefficient)
        assert found[part]["training"].half == pytest.approx(2.228 * error)
    assert found[benchmark.TOGETHER]["as run"].half == pytest.approx(2.228 * error * math.sqrt(5))
