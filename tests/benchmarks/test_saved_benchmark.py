"""benchmarks/training/saved_activations.py without a GPU: a Llama-8B block keeps two fifths of what BF16 does."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.harness.picture import Point, scatter
from benchmarks.training import saved_activations

UNIT = 2 * 4096 * 4096 / 2**30  # GiB of one payload, a byte an element, of [2 × 4096 tokens, width]


@pytest.mark.parametrize(
    ("model", "batches", "kv", "hidden"),
    [("Llama-8B block", 2, 1 / 4, 14336 / 4096), ("Llama-2-7B block", 1, 1, 11008 / 4096)],
)
def test_a_llama_block_keeps_two_fifths(model: str, batches: int, kv: float, hidden: float) -> None:
    # It keeps x twice, q, k and v, the attention's output, gate and up.
    unit, payloads = batches * UNIT, 1 + 1 + 1 + 2 * kv + 1 + 2 * hidden
    statistics = batches * 2 * 32 * 4096 * 4 / 2**30  # the attention's log-sum-exp
    counted = {way: saved_activations.count(model, way) for way in saved_activations.WAYS}
    inductor, own, fp8, with_qk = (c.gib for c in counted.values())
    assert own == pytest.approx(2 * payloads * unit + statistics, rel=0.001)
    assert [c.units for c in counted.values()] == pytest.approx([c.gib / (2 * unit) for c in counted.values()])
    # one payload is at hand
    assert with_qk == pytest.approx(payloads * unit * (1 + 4 / 128) + statistics, rel=0.005)
    query_and_keys, output = (1 + kv) * unit * (1 - 4 / 128), unit * (1 - 4 / 4096)  # an output's payload was at hand
    assert fp8 == pytest.approx(with_qk + query_and_keys + output, rel=0.001)
    assert fp8 < inductor / 2.3


@pytest.mark.parametrize("model", ["ViT-H layer", "U-Net levels"])
def test_other_models_keep_less_than_half(model: str) -> None:
    inductor, fp8 = (saved_activations.count(model, way).gib for way in list(saved_activations.WAYS)[0:3:2])
    assert fp8 < 0.5 * inductor


def test_the_picture_shows_every_point_and_escapes_names() -> None:
    points = [Point(5.5, 73.0, "compile", "BF16"), Point(3.5, 50.0, "<ours> & more", "fp8")]
    root = ElementTree.fromstring(scatter(points, "t", "x", "y"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}circle")) == 2
    assert {"compile", "<ours> & more"} <= {t.text for t in root.iter(f"{space}text")}
    first, second = root.findall(f".//{space}circle")
    assert float(first.get("cx", "")) > float(second.get("cx", ""))  # more memory lies to the right
    assert float(first.get("cy", "")) < float(second.get("cy", ""))  # more time lies above


def test_no_points_no_picture() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        scatter([], "t", "x", "y")
