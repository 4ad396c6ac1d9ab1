"""benchmarks/serving/inference.py without a GPU: every work runs, near to eager, and says what is not there."""

from __future__ import annotations

import pytest

from benchmarks.harness.peers import LeftOutError
from benchmarks.harness.processes import Case, in_this_process
from benchmarks.serving import inference


@pytest.mark.parametrize("work", ["Llama 1.1B · prompts 4×4096", "Llama 1.1B · tokens, batch 8"])
def test_a_frozen_model_is_near_and_in_fp8(work: str) -> None:
    assert work in {w.name for w in inference.WORKS}
    figures = in_this_process(inference.measure, Case(work, "fp8compile + frozen", tiny=True))
    assert figures["ms"] > 0
    assert 0 < figures["error"] < 0.2  # E4M3 has 2^-4 a cast; two layers
    converted, _, all_of_them, _ = figures["in_fp8"].split()
    assert 0 < int(converted) <= int(all_of_them)


@pytest.mark.parametrize("system", ["BF16 compile", "BF16 eager"])
def test_bf16_is_eager_s_own(system: str) -> None:
    figures = in_this_process(inference.measure, Case("Llama 1.1B · tokens, batch 1", system, tiny=True))
    assert figures["error"] == 0


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
def test_equal_attention_has_nothing_in_fp8() -> None:
    case = Case("Llama 1.1B · tokens, batch 8", "BF16, masks folded", tiny=True)
    figures = in_this_process(inference.measure, case)
    assert figures["in_fp8"].startswith("0 of ")
    assert figures["error"] < 0.01


def test_what_is_not_there_is_left_out() -> None:
    with pytest.raises(LeftOutError, match="torchao"):
        in_this_process(inference.measure, Case("Llama 1.1B · tokens, batch 1", "torchao per row", tiny=True))
