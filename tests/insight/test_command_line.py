"""The command line: every command on small things, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.insight import doctor
from fp8compile.insight.command_line import main
from fp8compile.insight.tables.summary import one_line

SCRIPT = """
import sys, torch, fp8compile
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).bfloat16()
step = torch.compile(model, backend="fp8", options={"select": sys.argv[1], "executor": "eager"})
step(torch.randn(8, 32).bfloat16()).sum().backward()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_explain_runs_a_script_and_shows_its_plans(script: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(script), "all"]) == 0
    shown = capsys.readouterr().out
    assert shown == str(fp8compile.Explanation(fp8compile.compiles()))
    assert "5 of 5 matmuls" in shown


def test_dump_then_explain_diff_and_edit(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "dump"
    assert main(["dump", "-o", str(folder), str(script), "all"]) == 0
    assert "index.txt" in capsys.readouterr().out
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown == str(fp8compile.Explanation.from_json((folder / "graph0/plan.json").read_text()))
    assert main(["explain", "--table", "all", str(folder)]) == 0
    assert capsys.readouterr().out == (folder / "graph0/plan.txt").read_text()
    assert main(["explain", "--table", "saved", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("    saved for backward")
    assert main(["explain", "--json", str(folder)]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == shown
    assert fp8compile.Options.parse({"plan": tmp_path / "plan.json"}).plan is not None
    assert main(["diff", str(folder)]) == 0
    assert "graph0/joint/quantize_matmuls" in capsys.readouterr().out.splitlines()
    assert main(["diff", str(folder), "input", "quantize_matmuls", "-U", "0"]) == 0
    assert "fp8.scaled_mm" in capsys.readouterr().out


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{bad")
    (tmp_path / "rows.json").write_text('{"matmuls": [{"path": "a", "role": "output"}]}')
    (tmp_path / "idle.py").write_text("")
    (tmp_path / "idle").mkdir()
    for name in ("dump", "measured"):
        (tmp_path / name / "graph0").mkdir(parents=True)
        index = '{"options": "", "stages": [{"half": "joint", "name": "input", "file": "0", "text_only": "x"}], '
        (tmp_path / name / "graph0" / "graph.json").write_text(index + '"code": [], "kernels": [], "failures": []}')
        (tmp_path / name / "graph0" / "0.txt").write_text("")
    (tmp_path / "measured" / "statistics.json").write_text("{}")
    (tmp_path / "bad.py").write_text("raise SystemExit('gave up')")
    for arguments, message in (
        (["diff", str(tmp_path)], "is no dump"),
        (["explain", str(tmp_path / "none.py")], "there is no file"),
        (["explain", str(tmp_path / "none.json")], "there is no file"),
        (["explain", str(tmp_path / "bad.json")], "neither a plan nor"),
        (["explain", str(tmp_path / "broken.json")], "broken.json' cannot be read: this is no JSON: Expecting"),
        (["explain", str(tmp_path / "rows.json")], "matmuls[0] (a output) of the plan: there is no 'decision'"),
        (["explain", str(tmp_path / "bad.py")], "ended with 'gave up'"),
        (["report", str(tmp_path / "dump"), "-o", str(tmp_path)], "is a folder: the page is a file, such as"),
        (["report", str(tmp_path / "measured")], "statistics.json: there is no 'rows'"),
        (["dump", "-o", str(tmp_path / "bad.py"), str(tmp_path / "idle.py")], "bad.py is a file: give another one"),
        (["dump", "-o", str(tmp_path / "idle"), str(tmp_path / "idle.py")], "idle.py compiled nothing"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    with pytest.raises(SystemExit):
        main([])


def test_a_plan_of_matmuls_alone_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "plan.json").write_text('{"matmuls": []}')
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.startswith("training\n  FP8       a graph without matmuls\n\n  more      options=")


def test_the_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 130
    findings = {f.what: f for f in doctor.examine()}
    assert findings["torch"].status == doctor.FINE
    assert findings["a trial"].status == doctor.FINE
    assert "2 matmuls in FP8" in findings["a trial"].seen
    assert "Nothing is wrong." in shown

    def breaks() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "CHECKS", (breaks,))
    assert main(["doctor"]) == 1
    assert "WRONG  breaks        RuntimeError: no driver" in capsys.readouterr().out


@pytest.mark.parametrize(("release", "status"), [("12.8", "note"), ("13.0", "ok"), (None, "note")])
def test_the_doctor_knows_assemblers(release: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    tool = tmp_path / "ptxas"
    if release is not None:
        tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.93'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    (finding,) = [f for f in doctor._triton() if f.what == "assembler"]
    assert finding.status == status
    assert ("two layouts" in finding.advice) == (release == "12.8")
    assert (release or "no ptxas") in finding.seen


def test_a_caches_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / "file" / "cache" / "fp8compile")
    (finding,) = doctor._caches()
    assert finding.status == doctor.WRONG


def test_the_line_in_the_log(caplog: pytest.LogCaptureFixture):
    """That it is said on request, and nothing by default, `tests/train/test_cache.py` sees."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    options = {"select": "all", "executor": "eager", "skip": ["1"]}
    with caplog.at_level("INFO", logger="fp8compile"):
        torch.compile(model, backend="fp8", options=options)(torch.randn(8, 32)).sum().backward()
    share = f"{2 * 2 * 8 * 32 * 32 / (2 * 2 * 8 * 32 * 32 + 3 * 2 * 8 * 32 * 8):.1%} of 45.1 kFLOP"
    expected = f"fp8: training graph, recipe mixed, cpu: 2 of 5 matmuls in FP8 ({share}); 3× left: skip='1'"
    assert any(record.getMessage().startswith(expected) for record in caplog.records)
    (plan,) = fp8compile.last_compile().plans
    assert one_line(plan).startswith(expected)
    plan.failure = "ValueError: x"
    assert one_line(plan).endswith("; FAILED: ValueError: x")
    assert json.loads(plan.to_json())["failure"] == "ValueError: x"
