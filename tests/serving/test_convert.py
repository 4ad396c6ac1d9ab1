"""`fp8compile export` and `fp8compile load`: folders of Transformers to FP8 and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from fake_quantized import sqnr

from fp8compile.insight.command_line import main
from tests.serving.test_export import LEAST, llama


@pytest.mark.parametrize("format", ["block", "tensor"])
def test_there_and_back(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    source, fp8, plain = (str(tmp_path / name) for name in ("source", "fp8", "plain"))
    model.save_pretrained(source)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    assert main(["export", source, "-o", fp8, "--format", format, "--skip", "down_proj"]) == 0
    said = capsys.readouterr().out
    assert "6 layers in FP8" in said
    assert "lm_head: skip='lm_head'" in said
    assert main(["load", fp8, "-o", plain]) == 0
    assert "6 layers were in FP8, and are bfloat16" in capsys.readouterr().out
    assert (tmp_path / "plain" / "tokenizer.json").read_text() == "{}"
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    back = transformers.LlamaForCausalLM.from_pretrained(plain, dtype="auto")
    for (name, x), (_, y) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        is_fp8 = "_proj" in name and "down_proj" not in name
        assert (LEAST < sqnr(x, y) < 60) if is_fp8 else torch.equal(x, y), name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "nowhere", "-o", "out"], "nowhere has no config.json"),
        (["load", "nowhere", "-o", "out"], "nowhere has no config.json"),
        (["export", "source", "-o", "out", "--format", "int4"], "unknown format 'int4'"),
        (["export", "source", "-o", "out", "--layers", "nothing"], "unknown layer in layers 'nothing'"),
        (["load", "source", "-o", "out"], "this checkpoint is not in FP8"),
        (["export", "fp8", "-o", "out"], "is quantized already"),
        (["export", "source", "-o", "fp8"], "is not empty"),
    ],
)
def test_what_cannot_be_done(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "source" in arguments or "fp8" in arguments:
        llama().save_pretrained("source")
        assert main(["export", "source", "-o", "fp8"]) == 0
    assert main(arguments) == 2
    assert text in capsys.readouterr().err
    assert not Path("out").exists()
