"""benchmarks/training/largest_batch.py without a GPU: it finds where a made-up memory ends, from any guess."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.workloads import WORKLOADS
from benchmarks.training import largest_batch as benchmark


@pytest.mark.parametrize("guess", [-3, 0, 1, 4, 5, 6, 9])
@pytest.mark.parametrize("fits", [0, 1, 5])
def test_the_largest_batch_is_found_from_any_guess(fits: int, guess: int) -> None:
    asked: list[int] = []

    def train(batch: int) -> dict[str, int] | None:
        asked.append(batch)
        return {"batch": batch} if batch <= fits else None

    found, tried = benchmark.largest(train, guess)
    assert found == ({"batch": fits} if fits else None)
    assert tried == len(asked) == len(set(asked))  # none twice
    assert min(asked) >= 1


def test_a_guess_lies_on_the_line_through_two_peaks() -> None:
    assert benchmark.guessed([(1, 10.0), (2, 12.5)], 40.0) == 13  # 10 + 12 · 2.5 = 40
    assert benchmark.guessed([(1, 10.0), (2, 12.5)], 39.9) == 12
    assert benchmark.guessed([(1, 10.0), (2, 12.5)], 5.0) == 2  # what has been trained, though not within the limit


def test_what_runs_out_of_memory_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a tiny model, on a CPU that is said to hold two sequences."""
    small = tuple(replace(w, tiny=w.tiny | {"num_hidden_layers": 1}) for w in WORKLOADS if w.name == "Llama 1.1B")
    batches: list[int] = []

    class Training(benchmark.Training):
        def step(self) -> None:
            batches.append(self.workload.batch)
            if self.workload.batch > 2:
                raise torch.OutOfMemoryError("more than two sequences")
            super().step()

    monkeypatch.setattr(benchmark, "WORKLOADS", small)
    monkeypatch.setattr(benchmark, "Training", Training)
    (row,) = benchmark.main(["--tiny", "--only", "Llama 1.1B · 40*", "--systems", "BF16 compile"])
    assert row.get("batch") == 2
    assert row.get("tried") == len(benchmark.SMALL) + 4  # 5, 4, 3, 2
    assert row.get("loss") == pytest.approx(5.55, abs=0.1)  # of 256 tokens, untrained
    assert set(batches) == {1, 2, 3, 4, 5}
    assert batches.count(3) == 1  # the first step of one that does not fit is its last
