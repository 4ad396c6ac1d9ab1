"""The scale model: hand arithmetic, limits, what was measured, and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import inf, isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.scaling import scale, scale_checks
from benchmarks.scaling.scale_inputs import (
    BF16,
    BF16_COMPILE,
    GIB,
    H100,
    H200,
    MODELS,
    OURS,
    OURS_ALL,
    OURS_EIGHT_BIT,
    OURS_GATHER,
    PEERS,
    SYSTEMS,
    TORCHAO,
    TORCHAO_GATHER,
    Job,
    Machine,
    Model,
    System,
)
from benchmarks.scaling.scale_model import head_bytes, largest_batch, optimizer, peak, predict
from benchmarks.scaling.scale_vision import Vision, vision_of
from fp8compile.devices import TABLE

BENCHMARKS = Path(scale.__file__).parents[1]
SMALL = Model(width=256, layers=2, heads=4, kv_heads=2, inner=512, vocabulary=1000)
LLAMA = MODELS["llama-8b"]
FREE_GATHER = replace(OURS_ALL, gather_overhead=0)
ALL = pytest.mark.parametrize("system", SYSTEMS + PEERS, ids=lambda s: s.name)


# ---- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions"), [("llama-1b", 1.236), ("llama-8b", 8.030), ("llama-13b", 13.02)])
def test_parameters_are_those_of_the_models(name: str, billions: float) -> None:
    # as published, but for norms: two of width parameters a layer, and one
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_parameters_of_70b() -> None:
    assert MODELS["llama-70b"].parameters / 1e9 == pytest.approx(70.55, rel=1e-3)


def test_peak_of_a_small_model_on_one_gpu() -> None:
    """FP32 parameters and states: 12 bytes each; backward of the first layer, with all gradients, holds most."""
    assert SMALL.layer == 589_824  # 256 · (256 q + 256 k and v + 256 out + 3 · 512)
    assert SMALL.parameters == 2 * 589_824 + 2 * 256_000
    saved = 256 * (14 * 256 + 4 * 128 + 6 * 512 + 4 * 4 + 8)  # tokens · bytes
    running = 256 * 3.4 * 512
    assert peak(Job(SMALL, 1, 2, 128), BF16_COMPILE) == pytest.approx(16 * 1_691_648 + saved + running)


def test_peak_of_a_small_model_on_two_gpus() -> None:
    gathered, gradients, buffer = 2 * 2 * 589_824, 2 * 589_824, 4 * 589_824
    saved = 256 * 7192
    assert peak(Job(SMALL, 2, 2, 128), BF16_COMPILE) == 8 * 1_691_648 + saved + gathered + gradients + buffer


def test_peak_at_the_loss() -> None:
    """Many tokens and a large vocabulary: BF16 logits and an FP32 form of them stand beside what all layers keep."""
    model = replace(SMALL, vocabulary=100_000)
    job = Job(model, 1, 8, 1024)
    at_rest = 12 * model.parameters
    assert peak(job, BF16_COMPILE) == at_rest + 2 * 8192 * 7192 + 6 * 8192 * 100_000
    assert head_bytes(job, OURS) == 4 * 25_600_000 + 2 * 2048 * 100_000  # chunks of 2048 rows, and an FP32 sum


def test_peak_at_the_loss_on_two_gpus() -> None:
    """The head's gathered weight and its gradient, in BF16, stand beside that."""
    model = replace(SMALL, vocabulary=100_000)
    at_rest = 12 * model.parameters / 2
    head = 2 * 2 * 25_600_000
    assert peak(Job(model, 2, 8, 1024), BF16_COMPILE) == at_rest + 2 * 8192 * 7192 + 6 * 8192 * 100_000 + head


def test_peak_at_the_end_of_backward() -> None:
    """Few tokens and a large vocabulary: the embedding's gradient in BF16, and its FP32 buffer."""
    model = replace(SMALL, vocabulary=100_000)
    assert peak(Job(model, 2, 1, 128), BF16_COMPILE) == 16 * model.parameters / 2 + 6 * 25_600_000


def test_states_and_parameters_in_bf16() -> None:
    job = Job(SMALL, 8, parameter=BF16)
    assert [s.state(job) for s in (BF16_COMPILE, OURS, OURS_ALL)] == [4, 4, 2.125]
    assert optimizer(job, OURS, H200) == SMALL.parameters / 8 * (3 * 2 + 2 * 4) / (H200.adamw_bf16 * 1e12)
    assert optimizer(job, OURS_ALL, H200) == SMALL.parameters / 8 * (3 * 2 + 2 * 2.125) / (H200.adamw_8bit * 1e12)


def test_checkpointing_keeps_the_input_of_a_layer() -> None:
    """Both peak at the loss, where all layers are kept."""
    none, full = (peak(Job(LLAMA, 64, 4, checkpoint=c), BF16_COMPILE) for c in ("none", "full"))
    assert none - full == 32 * 4 * 8192 * ((14 * 4096 + 4 * 1024 + 6 * 14336 + 4 * 32 + 8) - 2 * 4096)


# Bytes a token that `saved_activations.py --count` counts, of the shapes' blocks with 4 × 4096 tokens: BF16 with
# Inductor's cut; FP8 matmuls with the own cut, which torchao's saves as much as; saved in FP8.
COUNTED = {
    "llama-1b": (80_008, 51_336, 31_000), "llama-8b": (147_592, 94_344, 57_640),
    "llama-13b": (175_272, 116_904, 75_240), "llama-70b": (291_080, 184_584, 112_168),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_saved_is_what_is_counted(name: str) -> None:
    found = [system.saved.of(MODELS[name]) for system in (BF16_COMPILE, TORCHAO, OURS)]
    assert found == pytest.approx(COUNTED[name], abs=0.01)


def test_what_is_saved_is_what_was_planned() -> None:
    planned = scale_checks.results("saved_activations.json")["saved in FP8"]["predicted_gib"]
    assert OURS.saved.of(LLAMA) * 4 * 4096 / GIB == pytest.approx(planned, rel=1e-6)


@pytest.mark.parametrize(
    ("system", "name"), [(BF16_COMPILE, "compile"), (TORCHAO, "tensorwise"), (OURS, "saved in FP8")]
)
def test_what_runs_is_the_measured_peak_less_what_is_saved(system: System, name: str) -> None:
    """Of two blocks on 4 × 4096 tokens, above weights and gradients; FP8 weights of a layer are counted apart."""
    row = scale_checks.results("saved_activations.json")[name]
    running = (row["peak_gib"] - 2 * row["saved_gib"]) * GIB - (2 * LLAMA.layer if system.fp8 else 0)
    assert system.working.of(LLAMA) == pytest.approx(running / 4 / 4096, rel=0.015)  # kept to two digits


# ---- vision ---------------------------------------------------------------------------------------------------------

TOWER = Vision(
    width=64, layers=3, heads=2, mlp=256, rest=1000, patches=17, tokens=16, projector=(64, 256, 256), images=2
)
FROZEN = replace(TOWER, frozen=True)


@pytest.mark.parametrize("name", scale_checks.VISION_LANGUAGE)
def test_parameters_are_exactly_those_of_transformers(name: str) -> None:
    """On the meta device; the language model's biases and norms, which the scale model leaves out, counted here."""
    c = scale_checks.VISION_LANGUAGE[name]
    tower, text, is_clip = c.tower, c.language, c.tower.family == "clip"
    of_text = {
        "vocab_size": text.vocabulary, "hidden_size": text.width, "intermediate_size": text.inner,
        "num_hidden_layers": text.layers, "num_attention_heads": text.heads, "num_key_value_heads": text.kv_heads,
        "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.device("meta"):
        if is_clip:
            assert tower.patches == (336 // 14) ** 2
            vision = transformers.CLIPVisionConfig(
                hidden_size=tower.width, intermediate_size=tower.inner, num_hidden_layers=tower.layers,
                num_attention_heads=tower.heads, image_size=336, patch_size=14,
            )  # fmt: skip
            config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**of_text))
            model: Any = transformers.LlavaForConditionalGeneration(config)
            seen, projector = model.model.vision_tower, model.model.multi_modal_projector
        else:
            assert tower.patches == (448 // 14) ** 2
            of_tower = {"depth": tower.layers, "embed_dim": tower.width, "num_heads": tower.heads, "mlp_ratio": 4}
            of_tower |= {"hidden_size": text.width, "spatial_merge_size": 2, "patch_size": 14}
            config = transformers.Qwen2VLConfig(text_config=of_text, vision_config=of_tower, tie_word_embeddings=False)
            model = transformers.Qwen2VLForConditionalGeneration(config)
            seen, projector = model.model.visual, model.model.visual.merger.mlp

    def count(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    found = vision_of(c)
    assert found.projected == count(projector)
    assert found.tower == count(seen) - (0 if is_clip else count(projector))
    language = scale_checks.job_of(text).model
    biases = 0 if is_clip else language.layers * (language.width + 2 * language.kv)
    norms = (2 * language.layers + 1) * language.width
    assert found.tower + found.projected + language.parameters + biases + norms == count(model)


def test_peak_with_a_tower() -> None:
    """One GPU: beside the model's peak lie the tower's parameters and states, and what it and its projector keep."""
    block = 4 * 64**2 + 2 * 64 * 256
    tower, projector = 3 * (block + 9 * 64 + 256) + 1000, 64 * 256 + 256 + 256 * 256 + 256
    assert (TOWER.tower, TOWER.projected, FROZEN.trained) == (tower, projector, projector)
    job = Job(SMALL, 1, 2, 128, vision=TOWER)
    rows, each = 2 * 2 * 17, 14 * 64 + 4 * 64 + 6 * 128 + 4 * 2 + 8
    kept = 3 * rows * each + 2 * 2 * 16 * 2 * (64 + 256)
    below = 16 * SMALL.parameters + 4 * (tower + projector) + rows * 3.4 * 128
    alone = peak(replace(job, vision=None), BF16_COMPILE)
    assert peak(job, BF16_COMPILE) == pytest.approx(12 * (tower + projector) + kept + max(alone, below))
    kept = 2 * 2 * 16 * 2 * (64 + 256)
    assert peak(replace(job, vision=FROZEN), BF16_COMPILE) == pytest.approx(
        4 * tower + 12 * projector + kept + max(alone, 16 * SMALL.parameters + 4 * projector)
    )


def test_a_tower_sees_all_pairs_and_its_backward_counts_unless_it_is_frozen() -> None:
    only = {**NO_LINKS, **NO_COMPUTE}
    rows = 2 * 2 * 17
    attention, matmuls = (replace(H200, **{**only, name: 1.0}) for name in ("attention", "bf16"))
    for vision, times in ((TOWER, 3.5), (FROZEN, 1)):
        job = Job(SMALL, 1, 2, 128, vision=vision)

        def added(machine: Machine, job: Job = job) -> float:
            return (
                predict(job, BF16_COMPILE, machine).seconds
                - predict(replace(job, vision=None), BF16_COMPILE, machine).seconds
            )

        assert added(attention) == pytest.approx(3 * times * 2 * (2 * rows * 17) * 64 / 1e12, rel=1e-6)
        tower = 2 * rows * 3 * TOWER.layer * (1 if vision.frozen else 3)
        assert added(matmuls) == pytest.approx((tower + 6 * 2 * 2 * 16 * TOWER.projected) / 1e12, rel=1e-6)


def test_a_frozen_tower_is_gathered_once_and_never_reduced() -> None:
    machine = replace(H200, **{**NO_COMPUTE, "hop_nvlink": 0, "hop_network": 0, "overlap": 1})
    alone = predict(Job(SMALL, 8, 2, 128), OURS, machine)
    for vision, moved in ((TOWER, 8), (FROZEN, 2)):
        found = predict(Job(SMALL, 8, 2, 128, vision=vision), OURS, machine)
        wanted = (moved * 3 * TOWER.layer + 8 * TOWER.projected) * 7 / 8 / 360e9
        assert found.communication - alone.communication == pytest.approx(wanted)
        assert found.seconds - alone.seconds == pytest.approx(wanted)


# ---- limits ---------------------------------------------------------------------------------------------------------

NO_LINKS = {"nvlink": inf, "infiniband": inf, "hop_nvlink": 0.0, "hop_network": 0.0}
NO_COMPUTE = dict.fromkeys(("bf16", "fp8", "attention", "memory", "adamw_fp32", "adamw_bf16", "adamw_8bit"), inf)


@ALL
@pytest.mark.parametrize("gpus", [1, 2, 8, 512])
def test_fast_links_leave_compute(system: System, gpus: int) -> None:
    found = predict(Job(LLAMA, gpus), system, replace(H200, **NO_LINKS))
    assert found.communication == 0
    assert found.seconds == pytest.approx(found.compute)
    assert found.seconds <= predict(Job(LLAMA, gpus), system).seconds


def test_matmuls_alone_take_six_flops_a_parameter_and_token() -> None:
    only = replace(H200, **{**NO_LINKS, **NO_COMPUTE, "bf16": 1.0})
    weights = 32 * LLAMA.layer + LLAMA.table
    assert predict(Job(LLAMA, 1), BF16_COMPILE, only).seconds == pytest.approx(6 * 8192 * weights / 1e12)
    only = replace(only, bf16=inf, fp8=2.0)
    assert predict(Job(LLAMA, 1), OURS, only).seconds == pytest.approx(6 * 8192 * 32 * LLAMA.layer / 2e12)


def test_attention_alone_sees_half_of_all_pairs() -> None:
    only = replace(H200, **{**NO_LINKS, **NO_COMPUTE, "attention": 1.0})
    forward = 2 * (2 * 8192 * 8192 / 2) * 4096  # two matmuls, two FLOPs
    assert predict(Job(LLAMA, 1), OURS, only).seconds == pytest.approx(32 * 3.5 * forward / 1e12)


@pytest.mark.parametrize(("gpus", "rate"), [(2, 360e9), (8, 360e9), (64, 100e9), (512, 100e9)])
@pytest.mark.parametrize(
    ("system", "layer_bytes"), [(BF16_COMPILE, 8), (OURS, 8), (replace(OURS_ALL, gather_overhead=0), 6)]
)
def test_slow_links_leave_bytes_over_rate(gpus: int, rate: float, system: System, layer_bytes: int) -> None:
    """Weights are gathered twice, gradients reduced in FP32; hosts take in 8 · 12.5 GB/s."""
    machine = replace(H200, **{**NO_COMPUTE, "hop_nvlink": 0, "hop_network": 0, "infiniband": 12.5, "overlap": 1})
    moved = layer_bytes * 32 * LLAMA.layer + 8 * 2 * LLAMA.table
    seconds = predict(Job(LLAMA, gpus), system, machine).seconds
    assert seconds == pytest.approx(moved * (gpus - 1) / gpus / rate)


def test_a_tied_table_is_gathered_and_reduced_once() -> None:
    machine = replace(H200, **{**NO_COMPUTE, "hop_nvlink": 0, "hop_network": 0, "overlap": 1})
    model = MODELS["llama-1b"]
    assert predict(Job(model, 8), OURS, machine).seconds == pytest.approx(8 * model.parameters * 7 / 8 / 360e9)


def test_logits_alone_are_moved_in_sixteen_bytes() -> None:
    only = replace(H200, **{**NO_LINKS, **NO_COMPUTE, "memory": 1.0})
    more = replace(LLAMA, vocabulary=LLAMA.vocabulary + 1000)
    moved = predict(Job(more, 1), OURS, only).seconds - predict(Job(LLAMA, 1), OURS, only).seconds
    assert moved == pytest.approx(16 * 8192 * 1000 / 1e12, rel=1e-6)


def test_hybrid_sharding_reduces_shards_between_hosts() -> None:
    machine = replace(H200, **{**NO_COMPUTE, "nvlink": inf, "hop_nvlink": 0, "hop_network": 0, "overlap": 1})
    seconds = predict(Job(LLAMA, 64, sharding="hybrid"), BF16_COMPILE, machine).seconds
    assert seconds == pytest.approx(2 * 7 / 8 * 4 * LLAMA.parameters / 8 / 50e9)  # ring all-reduce of an eighth


def test_hops_alone() -> None:
    machine = replace(H200, **{**NO_COMPUTE, **NO_LINKS, "hop_nvlink": 1.0, "hop_network": 10.0, "overlap": 1})
    seconds = predict(Job(LLAMA, 64), BF16_COMPILE, machine).seconds
    assert seconds == pytest.approx(3 * 34 * (56 * 1 + 7 * 10) * 1e-6)  # three collectives of 34 units


def test_no_overlap_is_a_sum() -> None:
    found = predict(Job(LLAMA, 64), OURS, replace(H200, overlap=0.0))
    assert found.seconds == pytest.approx(found.compute + found.communication)


# ---- directions -----------------------------------------------------------------------------------------------------


@ALL
def test_more_tokens_take_longer_and_hold_more(system: System) -> None:
    found = [predict(Job(LLAMA, 64, batch), system) for batch in (1, 2, 4, 8)]
    assert sorted(p.seconds for p in found) == [p.seconds for p in found]
    assert sorted(p.peak for p in found) == [p.peak for p in found]
    assert sorted(p.tokens_per_second for p in found) == [p.tokens_per_second for p in found]  # weights are shared


@ALL
def test_more_gpus_hold_less_each(system: System) -> None:
    peaks = [peak(Job(LLAMA, gpus), system) for gpus in (2, 4, 8, 64, 512)]
    assert sorted(peaks, reverse=True) == peaks


@ALL
@pytest.mark.parametrize("name", ["bf16", "fp8", "attention", "memory", "adamw_fp32", "nvlink", "infiniband"])
def test_faster_is_never_slower(system: System, name: str) -> None:
    job = Job(LLAMA, 64, sharding="hybrid")
    faster = replace(H200, **{name: 2 * getattr(H200, name)})
    assert predict(job, system, faster).seconds <= predict(job, system).seconds


def test_fp8_states_and_payloads_hold_less() -> None:
    peaks = [peak(Job(LLAMA, 8, 2), s) for s in (BF16_COMPILE, TORCHAO, OURS, OURS_EIGHT_BIT, OURS_ALL)]
    assert sorted(peaks, reverse=True) == peaks


def test_gathering_fp8_needs_several_gpus() -> None:
    assert predict(Job(LLAMA, 1), OURS_GATHER) == predict(Job(LLAMA, 1), OURS)


@ALL
@pytest.mark.parametrize("capacity", [80, 141])
def test_the_largest_batch_fits_and_one_more_does_not(system: System, capacity: int) -> None:
    job, free = Job(LLAMA, 8), (capacity - H200.reserve) * GIB
    batch = largest_batch(job, system, capacity)
    assert peak(replace(job, batch=batch), system) <= free < peak(replace(job, batch=batch + 1), system)


def test_nothing_fits() -> None:
    assert largest_batch(Job(MODELS["llama-70b"], 8), BF16_COMPILE, 80) == 0


# ---- what was measured, and the page --------------------------------------------------------------------------------


def test_rates_are_those_of_the_cost_model() -> None:
    device = TABLE["H200"]
    assert (H200.bf16, H200.fp8) == (device.bf16, device.fp8_tensor)
    device = TABLE["H100"]
    assert (H100.bf16, H100.fp8) == (device.bf16, device.fp8_tensor)


@pytest.mark.parametrize(
    ("name", "row", "moved"),
    [
        ("adamw_8bit", "AdamW, `log`", 3 * 2 + 2 * 2.125),
        ("adamw_bf16", "torch AdamW, fused, BF16 states", 3 * 2 + 2 * 4),
        ("adamw_fp32", "torch AdamW, fused, FP32", 3 * 4 + 2 * 8),
    ],
)
def test_rates_of_optimizers_are_those_of_their_page(name: str, row: str, moved: float) -> None:
    """872 M parameters; a parameter and its state are read and written, its gradient is read."""
    page = (BENCHMARKS.parent / "docs" / "optimizer.md").read_text()
    ms = next(float(line.split("|")[2]) for line in page.splitlines() if line.startswith(f"| {row}"))
    assert getattr(H200, name) == pytest.approx(872e6 * moved / (ms * 1e-3) / 1e12, abs=0.005)


def test_the_rate_of_attention() -> None:
    """8.3 ms for two blocks of 16,384 tokens in sequences of 4096, width 4096, 3.5 times forward's FLOPs."""
    assert H200.attention == pytest.approx(2 * 3.5 * 2 * 16384 * 4096 * 4096 / 8.3e-3 / 1e12, rel=1e-3)


def test_fitted_inputs_are_what_the_fit_gives() -> None:
    assert scale_checks.fitted_overlap() == H200.overlap
    for system in (OURS_GATHER, TORCHAO_GATHER):
        assert isclose(scale_checks.fitted_gather_overhead(system), system.gather_overhead)


def test_two_gpus_are_met() -> None:
    """What docs/scale.md may claim: three times from one fitted number, two more from one each."""
    for row in scale_checks.two_gpus():
        assert row.ms is not None
        assert row.peak_gib is not None
        found = predict(row.job, row.system)
        assert found.seconds * 1e3 == pytest.approx(row.ms, rel=0.02)
        assert found.peak / GIB == pytest.approx(row.peak_gib, rel=0.07)


@pytest.mark.parametrize(("file", "reduced"), [("fsdp", ("3328", "858")), ("fsdp_4gpus", ("4992",))])
def test_blocks_of_docs_are_those_of_the_results(file: str, reduced: tuple[str, ...]) -> None:
    page = (BENCHMARKS.parent / "docs" / "distributed.md").read_text()
    rows = json.loads((BENCHMARKS / "results" / f"{file}.json").read_text())["rows"]
    ends = tuple(f"· {mib} |" for mib in reduced)
    lines = [line.replace("*", "") for line in page.splitlines() if line.endswith(ends)]
    assert len(lines) == len(rows)
    for row in rows:
        ms, peak = f"{row['ms']:.1f}", f"{row['peak_gib']:.2f}"
        moved = f"{row['gather_mib']:.0f} · {row['reduce_mib']:.0f}"
        assert any(f"| {ms} " in line and f"| {peak} |" in line and moved in line for line in lines), row["name"]


def test_the_run_with_kept_shards_is_that_of_the_results() -> None:
    page = (BENCHMARKS.parent / "docs" / "distributed.md").read_text().replace("*", "")
    for row in json.loads((BENCHMARKS / "results" / "fsdp_kept.json").read_text())["rows"]:
        ms, peak = f"{row['ms']:.1f}", f"{row['peak_gib']:.2f}"
        line = next(line for line in page.splitlines() if line.endswith(f"| {peak} |") and f"| {ms} " in line)
        assert f"| {row['gather_mib']:.0f} |" in line, row["name"]


def test_claims_of_the_page() -> None:
    eight, more = (predict(Job(LLAMA, gpus, 2, checkpoint="full"), TORCHAO, H100).seconds for gpus in (8, 128))
    assert more == pytest.approx(eight, rel=0.005)
    job = Job(MODELS["llama-70b"], 128, checkpoint="full")
    ratio = predict(job, BF16_COMPILE, H100).seconds / predict(job, TORCHAO_GATHER, H100).seconds
    assert f"{ratio:.2f}× here" in scale_checks.PAGE.read_text()


def test_the_page_has_the_tables() -> None:
    page = scale_checks.PAGE.read_text()
    assert scale_checks.filled(page) == page, "run: python -m benchmarks.scaling.scale_checks --write"
    assert {place[2] for place in scale_checks.PLACE.finditer(page)} == set(scale_checks.TABLES)


# ---- command line ---------------------------------------------------------------------------------------------------


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--model", "llama-8b", "--gpus", "8,64", "--system", "ours", "--batch", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in rows] == [8, 64]
    assert rows[0]["peak_gib"] == peak(Job(LLAMA, 8, 2), OURS) / GIB


def test_text_and_inputs_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--gpus", "64", "--layers", "16", "--set", "infiniband=5", "--parameters", "bf16", "--system", "BF16"])
    head, row = capsys.readouterr().out.splitlines()
    job = Job(replace(LLAMA, layers=16), 64, parameter=BF16)
    expected = predict(job, BF16_COMPILE, replace(Machine(), infiniband=5))
    assert dict(zip(head.split(), row.split(), strict=True))["ms"] == f"{expected.seconds * 1e3:.0f}"


def test_largest_batches(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--model", "llama-70b", "--gpus", "8", "--system", "BF16", "--memory", "80,141", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["memory_gib"], row["largest_batch"], row["tokens_per_second"]) for row in rows] == [
        (80, 0, 0),
        (141, 0, 0),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 12", "12 GPUs do not fill hosts of 8: give 8 or fewer, or a multiple"),
        ("--gpus 8,many", "'8,many' is no list of whole numbers"),
        ("--gpus 0", "gpus is 0: it must be at least 1"),
        ("--batch 0", "batch is 0: it must be at least 1"),
        ("--sequence -1", "sequence is -1: it must be at least 1"),
        ("--heads 7", "width 4096 is no multiple of heads 7"),
        ("--kv-heads 5", "heads 32 is no multiple of kv_heads 5"),
        ("--vocabulary -1", "vocabulary is -1: it must be 0"),
        ("--system theirs", "no system matches 'theirs'; there are BF16, ours"),
        ("--sharding zero", "sharding is 'zero': it must be one of 'full', 'hybrid'"),
        ("--checkpoint some", "checkpoint is 'some': it must be one of 'none', 'full'"),
        ("--set nvlinks=3", "--set is 'nvlinks': it must be one of 'bf16'"),
        ("--set nvlink=fast", "--set nvlink=fast: 'fast' is no number"),
        ("--set nvlink=0", "nvlink is 0: a rate must be above 0"),
        ("--set overlap=2", "overlap is 2: it must be between 0 and 1"),
        ("--memory 80GB", "'80GB' is no list of whole numbers"),
    ],
)
def test_mistakes_are_told(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(arguments.split())
    assert message in capsys.readouterr().err


def test_it_needs_python_alone() -> None:
    imports = "import sys; from benchmarks.scaling import scale, scale_checks"
    code = f"{imports}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS.parent, check=True)
