"""benchmarks/training/saved_activations.py without a GPU: a Llama-8B block keeps two fifths of what BF16 does."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.harness.picture import Point, scatter
from benchmarks.training import saved_activations

UNIT = 4 * 4096 * 4096 / 2**30  # GiB of one payload [tokens, width]
# A Llama-8B block keeps x twice, q, k and v (a quarter each), the attention's output, gate and up (3.5 each).
PAYLOADS = 1 + 1 + 0.25 + 0.25 + 1 + 1 + 3.5 + 3.5
STATISTICS = 4 * 32 * 4096 * 4 / 2**30  # the attention's log-sum-exp


def test_a_llama_block_keeps_two_fifths() -> None:
    found = {way: saved_activations.count("Llama-8B block", way).gib for way in saved_activations.WAYS}
    inductor, own, fp8, with_qk = found.values()
    assert own == pytest.approx(2 * PAYLOADS * UNIT + STATISTICS, rel=0.001)
    assert with_qk == pytest.approx(PAYLOADS * UNIT * (1 + 4 / 128) + STATISTICS, rel=0.005)  # one payload is at hand
    assert with_qk <= 0.78
    query_and_keys, output = 1.25 * UNIT * (1 - 4 / 128), UNIT * (1 - 4 / 4096)  # an output's payload was at hand
    assert fp8 == pytest.approx(with_qk + query_and_keys + output, rel=0.001)
    assert fp8 < inductor / 2.5


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
