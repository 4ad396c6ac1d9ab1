"""The optimizer benchmarks without a GPU: they run, and their figures are what they say."""

from __future__ import annotations

import json

import pytest

from benchmarks.optimizer import compiling, states, step
from fp8compile.options import Options


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch):
    """Its C++ takes longer to compile than anything here; tests/optimizer has it."""
    parse = Options.parse
    monkeypatch.setattr(Options, "parse", lambda given, mode=None: parse({**(given or {}), "executor": "eager"}, mode))


def test_step_of_872_million_parameters():
    benchmark = step
    count = sum(benchmark.torch.Size(shape).numel() for shape in benchmark.BLOCK * 4)
    assert round(count / 1e6) == 872


def test_tiny_step(tmp_path):
    file = tmp_path / "figures.json"
    results = step.main(["--tiny", "--only", "log,torch fused*,torchao*", "--json", str(file)])
    by_name = {r.name: r for r in results}
    assert by_name["torch fused, BF16 states"].state_bytes == pytest.approx(4, abs=0.01)
    assert 2.125 <= by_name["log"].state_bytes < 2.2
    assert len(json.loads(file.read_text())["rows"]) == len(results)


def test_states_over_a_few_steps(tmp_path, capsys):
    file = tmp_path / "figures.json"
    states.main(["--steps", "3", "--source", "synthetic", "--json", str(file)])
    rows = json.loads(file.read_text())["results"]["synthetic"]
    errors = {(r["m"], r["v"]): r["figures"]["3"]["error"] for r in rows}
    assert errors["log", "log"] < errors["e4m3", "e4m3"]
    assert "after 3 steps" in capsys.readouterr().out


def test_compiling(tmp_path):
    file = tmp_path / "figures.json"
    results = compiling.main(["--tiny", "--counts", "3", "--only", "fused", "--json", str(file)])
    assert len(json.loads(file.read_text())["rows"]) == 1
    results.append(compiling.measure_here("ours", 3, "cpu"))  # what a new process does, but for its start
    assert [(r.name, r.tensors, r.note) for r in results] == [("fused", 3, ""), ("ours", 3, "")]
    fused, ours = (r.first_s for r in results)
    assert ours
    assert fused
    assert ours > fused > 0
