"""The example: its command, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import export_model
import generate
from tests.serving.test_export import EAGER


def test_logits_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other process is played by this one: that it starts is shown whenever a person runs the example.

    Of the format that a library decompresses; test_export.py loads all of them.
    """
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        started.append(command)
        export_model.main(command[2:])

    monkeypatch.setattr(export_model, "subprocess", SimpleNamespace(run=run))  # torch starts others by itself
    monkeypatch.setattr(export_model, "OPTIONS", EAGER)
    monkeypatch.setattr(export_model, "SIZES", {**export_model.SIZES, "num_hidden_layers": 1})
    export_model.main(["--format", "channel", "--steps", "3", "--folder", str(tmp_path / "out")])
    assert len(started) == 1
    said = capsys.readouterr().out
    assert "7 layers in FP8 (channel)" in said
    found = re.search(r"against BF16: ([\d.]+) dB, the same next token in ([\d.]+) %", said)
    assert found is not None
    assert float(found[1]) > 18
    assert float(found[2]) > 80


def test_generated_text_is_that_of_bf16(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(export_model, "OPTIONS", EAGER)
    monkeypatch.setattr(generate, "OPTIONS", EAGER)
    monkeypatch.setattr(generate, "SIZES", {**export_model.SIZES, "num_hidden_layers": 1})
    generate.main(["--tokens", "6", "--steps", "12"])
    trained, bf16, kept, freed = capsys.readouterr().out.splitlines()
    assert trained.startswith("trained 12 steps")
    shares = [100.0 if "the same tokens" in line else float(line.split("%")[0].split()[-1]) for line in (kept, freed)]
    assert shares[0] == shares[1] > 80
    weights = [float(line.split()[-4]) for line in (bf16, kept, freed)]
    assert weights[2] < weights[0] < weights[1]
