"""benchmarks/training/compile_time.py without a GPU: the parts make up the whole, and every pass is among them."""

from __future__ import annotations

import pytest
import torch
from pipelines import names_of
from torch import Tensor, nn

from benchmarks.harness.columns import Row
from benchmarks.training import compile_time
from fp8compile.passes import pipeline
from fp8compile.passes.core.stages import Stage

PARTS = ("trace", "autograd", "passes", "inductor", "kernels", "rest")


class FeedForward(nn.Sequential):
    """A workload without attention, under the name of one that has some; it returns its loss."""

    name = "Llama 100M"

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def built(self, device: str, tiny: bool) -> nn.Module:
        return FeedForward().to(device, torch.bfloat16)

    def made(self, model: nn.Module, device: str, tiny: bool) -> dict[str, Tensor]:
        return {"x": torch.randn(16, 64, device=device).bfloat16()}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def test_tiny_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_time, "WORKLOADS", (FeedForward(),))  # a Llama: test_train_step_benchmark
    rows = {r.system: r for r in compile_time.main(["--tiny", "--only", "*100M", "--systems", "BF16*,fp8compile"])}
    for row in rows.values():
        assert sum(row.get(part) for part in PARTS) == pytest.approx(row.get("cold_seconds"))
        assert min(row.get(part) for part in PARTS) >= 0
        assert row.get("warm_seconds") > 0
    assert rows["BF16 compile"].get("passes") == 0
    by_pass = rows["fp8compile"].get("by_pass")
    run = {*names_of(Stage.JOINT), "verify", "cut", "form_regions", "combine_regions"}
    assert run <= by_pass.keys()
    assert rows["fp8compile"].get("passes") == pytest.approx(sum(by_pass.values()))
    assert "ms of each pass: canonicalize" in capsys.readouterr().out


def test_passes_are_timed_in_the_context_alone() -> None:
    before = pipeline.PIPELINE
    with compile_time.timed_passes():
        assert pipeline.PIPELINE is not before
    assert pipeline.PIPELINE is before


def test_passes_within_inductor_are_not_counted_as_its() -> None:
    stages = {"bytecode_tracing": 1.0, "compile_fx_inner": 10.0, "async_compile.wait": 3.0}
    parts = compile_time.shares(20.0, stages, {"canonicalize": 0.5, "form_regions": 2.0})
    assert parts == {"trace": 1.0, "autograd": 0.0, "passes": 2.5, "inductor": 5.0, "kernels": 3.0, "rest": 8.5}


def test_passes_are_printed_for_those_who_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    compile_time.print_passes(
        [Row("m", "BF16 compile", "", {"by_pass": {}}), Row("m", "s", "", {"by_pass": {"a": 0.5}})]
    )
    assert capsys.readouterr().out == "m, ms of each pass: a 500\n"
