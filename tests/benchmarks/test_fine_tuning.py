"""benchmarks/training/fine_tuning.py on a CPU: what its scores count, what adapters train, and that every way runs."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from benchmarks.training import fine_tuning as benchmark
from corpus import Corpus
from llama import Llama

TEXT = Path(asyncio.__file__).parent  # that no change of this project changes, and is soon read
TINY = benchmark.SIZES["tiny"]
SMALL = replace(TINY, model=replace(TINY.model, n_layers=1), held_out_batches=1, steps=6)


class Knowing(nn.Module):
    """A model whose most probable next byte is the present one plus one."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Identity()

    def forward(self, tokens: Tensor, targets: Tensor) -> None:
        self.lm_head(nn.functional.one_hot((tokens + 1) % 256, 256).float())


def study(first: bytes, second: bytes) -> benchmark.Study:
    texts = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (first, second)]
    corpora = [Corpus(text, text, "") for text in texts]
    return benchmark.Study(SMALL, torch.device("cpu"), *corpora, executor="eager")


def test_what_the_scores_count():
    """Of "ab" the second byte is foreseen, of "ba" it is not; "(" comes before ")", and nothing before "]"."""
    found = study(b"ab" * 600, b"()b]" * 300).scores(Knowing())  # type: ignore[arg-type]
    assert found["before"] == pytest.approx(0.5)
    assert found["next"] == pytest.approx(0.25)
    assert found["closing"] == pytest.approx(0.5)
    assert found["copying"] == pytest.approx(1 / 26, abs=0.03)  # chance


def test_words_come_twice():
    words = benchmark.repeated_words(4, 65)
    assert torch.equal(words[:, :32], words[:, 33:])
    assert not torch.equal(words[0, :32], words[1, :32])
    assert all(chr(letter).islower() for letter in words.flatten().tolist())


def test_adapters_train_alone_and_begin_as_nothing():
    torch.manual_seed(0)
    model = Llama(SMALL.model, max_seq=64)
    tokens = torch.randint(256, (2, 64))
    with torch.autocast("cpu", torch.bfloat16):
        before = model(tokens, tokens)
        benchmark.adapt(model)
        after = model(tokens, tokens)
    assert torch.equal(before, after)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * SMALL.model.n_layers
    assert all(name.endswith(("down.weight", "up.weight")) for name in trained)
    after.backward()
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark.SIZES, "tiny", SMALL)


@pytest.mark.usefixtures("small")
def test_ways_run_and_are_compared(tmp_path: Path, capsys: Any):
    file = tmp_path / "tuned.json"
    given = ["--tiny", "--first", str(TEXT), "--second", str(TEXT), "--json", str(file)]
    results = benchmark.main([*given, "--ways", benchmark.BASE, "O2", "adapters on FP8"])
    assert [r.name for r in results] == [benchmark.BASE, "O2", "adapters on FP8"]
    plain, whole, adapted = results
    assert 0 < abs(whole.loss / plain.loss - 1) < 0.01  # in FP8, and not far
    assert adapted.loss != plain.loss
    assert set(plain.scores) == set(benchmark.SCORES)
    assert any(row.decision == "fp8" for plan in fp8compile.compiles() for row in plan.matmuls)
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == [r.name for r in results]
    assert "adapters on FP8" in capsys.readouterr().out


def test_the_table_has_gaps_to_bf16_of_the_same_seed():
    scores = dict.fromkeys(benchmark.SCORES, 0.5)
    better = dict.fromkeys(benchmark.SCORES, 0.51)
    results = [
        benchmark.Result(benchmark.BASE, 0, 1.0, 10.0, scores), benchmark.Result(benchmark.BASE, 1, 2.0, 10.0, scores),
        benchmark.Result("O3", 0, 1.01, 8.0, better), benchmark.Result("O3", 1, 2.02, 8.0, better),
        benchmark.Result("O2", 2, 1.0, 9.0, scores),  # without BF16 of its seed
    ]  # fmt: skip
    text = benchmark.table(results)
    assert "+1.00% ± 0.00%" in text
    assert "+1.00 ± 0.00" in text
    assert "50.00%" in text
    assert "O2" not in text
    assert math.isnan(benchmark.Share().value)
