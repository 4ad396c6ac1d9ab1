"""benchmarks/training/train_step.py without a GPU: every model trains in one graph, with the states that it should
have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.processes import Case, in_this_process
from benchmarks.harness.workloads import WORKLOADS
from benchmarks.training import train_step

BY_NAME = {w.name: w for w in WORKLOADS}
CHEAP = "BF16 compile,fp8compile + 8-bit states,torchao*"


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiny models, which have two."""
    small = tuple(
        replace(w, tiny=w.tiny | {"n_layer" if "n_layer" in w.tiny else "num_hidden_layers": 1}) for w in WORKLOADS
    )
    monkeypatch.setattr(train_step, "WORKLOADS", small)


def test_tiny_llama() -> None:
    rows = {r.system: r for r in train_step.main(["--tiny", "--only", "Llama 1.1B", "--systems", CHEAP])}
    assert len(rows) == 5
    assert all(r.note == "torchao is not installed" for r in rows.values() if not r.figures)
    bf16 = rows["BF16 compile"]
    for row in rows.values():
        if row.figures:
            assert row.get("loss") == pytest.approx(bf16.get("loss"), abs=0.005)
            assert row.get("parameters") == 69_824
    assert bf16.get("state_bytes") == pytest.approx(4.0, abs=0.01)  # two moments of BF16, and a count of steps
    ours = rows["fp8compile + 8-bit states"]
    assert 2.125 < ours.get("state_bytes") < 3  # two moments of 8 bits with side data; those of small tensors stay BF16
    assert ours.get("in_fp8") == f"{4 * 3} of {4 * 3 + 3} matmuls"  # all but the head's


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
def test_folded_masks_alone_round_nothing() -> None:
    names = ("BF16 compile", "BF16, masks folded")
    bf16, folded = (in_this_process(train_step.measure, Case("ViT-H", name, tiny=True)) for name in names)
    assert folded["in_fp8"].startswith("0 of ")
    assert folded["loss"] == pytest.approx(bf16["loss"], abs=1e-3)  # BF16 steps in another order of additions
    assert folded["state_bytes"] == bf16["state_bytes"]


@pytest.mark.parametrize("name", [w.name for w in WORKLOADS if not w.name.startswith(("Llama", "Mixtral"))])
def test_a_model_is_one_graph(name: str) -> None:
    """What it becomes in FP8 the models of its family in tests/train/test_models.py show."""
    workload = next(w for w in train_step.WORKLOADS if w.name == name)
    model = workload.built("cpu", tiny=True)
    loss = torch.compile(model, backend="eager", fullgraph=True)(**workload.made(model, "cpu", tiny=True))
    assert loss > 0


def test_experts_are_measured_in_one_graph() -> None:
    figures = in_this_process(train_step.measure, Case("Mixtral (8 layers)", "fp8compile", tiny=True))
    assert figures["graphs"] == 1
    assert figures["note"] == ""
    assert figures["loss"] > 0


@pytest.mark.parametrize(
    ("name", "millions"),
    [("Llama 1.1B", 1104), ("Llama-8B (8 layers)", 2796), ("Llama 100M", 110), ("Qwen2 1.5B", 1544),
     ("GPT-2 XL (16 layers)", 574), ("ViT-H", 632), ("Mixtral (8 layers)", 3034),
     ("GPT-2 medium", 355), ("BERT-large", 335), ("ViT-L", 304)],
)  # fmt: skip
def test_sizes(name: str, millions: int) -> None:
    model = BY_NAME[name].built("meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
