"""torch analyses each of our kernels once, and every other kernel as often as it likes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._higher_order_ops import triton_kernel_wrap

from fp8compile.passes.lower import known_accesses


class Kernel:
    """Stands for a Triton function."""


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's own analysis was asked for."""
    asked: list[Any] = []

    def analysis(kernel: Any, arguments: dict[str, Any]) -> list[str]:
        asked.append(kernel)
        return sorted(arguments)

    for name in known_accesses.ANALYSES:
        monkeypatch.setattr(triton_kernel_wrap, name, analysis, raising=False)
    monkeypatch.setattr(known_accesses, "_ours", {})
    return asked


@pytest.mark.parametrize("name", known_accesses.ANALYSES)
def test_one_analysis_for_all_launches_of_a_kernel(analysed: list[Any], name: str) -> None:
    ours, other = Kernel(), Kernel()
    known_accesses.analyse_once(ours)
    known_accesses.analyse_once(other)
    ask = getattr(triton_kernel_wrap, name)
    assert [ask(ours, {"x0": 1, "y0": 2}) for _ in range(3)] == [["x0", "y0"]] * 3
    assert ask(other, {"x0": 1}) == ["x0"]
    assert analysed == [ours, other]


@pytest.mark.parametrize("name", known_accesses.ANALYSES)
def test_an_autotuner_is_its_kernel(analysed: list[Any], name: str) -> None:
    ours = Kernel()
    known_accesses.analyse_once(ours)
    tuned = SimpleNamespace(fn=ours, configs=[])
    ask = getattr(triton_kernel_wrap, name)
    assert ask(tuned, {"x0": 1}) == ask(ours, {"x0": 1}) == ["x0"]
    assert analysed == [tuned]


@pytest.mark.parametrize("name", known_accesses.ANALYSES)
def test_kernels_of_others_are_analysed_each_time(analysed: list[Any], name: str) -> None:
    known_accesses.analyse_once(Kernel())
    ask, other = getattr(triton_kernel_wrap, name), Kernel()
    assert ask(other, {"x0": 1}) == ["x0"]
    assert ask(other, {"x1": 1}) == ["x1"]
    assert analysed == [other, other]


def test_torch_has_the_analysis_under_one_of_its_names() -> None:
    assert any(callable(getattr(triton_kernel_wrap, name, None)) for name in known_accesses.ANALYSES)
