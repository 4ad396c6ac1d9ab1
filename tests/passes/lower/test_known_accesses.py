"""torch is told what our kernels access, and analyses every other kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._higher_order_ops import triton_kernel_wrap

from fp8compile.passes.lower import known_accesses

NEWER, OLDER = known_accesses.ANALYSES
ARGUMENTS = ["x0", "x1"], ["y0", "y1"]


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
    monkeypatch.setattr(known_accesses, "_known", {})
    known_accesses.declare_accesses()
    return asked


def told(name: str, kernel: Any) -> tuple[list[str], list[str]]:
    """What is read and what is written, as torch of one or the other version is told."""
    found = getattr(triton_kernel_wrap, name)(kernel, {"x0": 1})
    if name == OLDER:
        return [], found
    assert not found.can_fuse_epilogue
    reads, writes = found.read_writes.reads, found.read_writes.writes
    return sorted(dep.name for dep in reads), sorted(dep.name for dep in writes)


@pytest.mark.parametrize("name", known_accesses.ANALYSES)
def test_buffers_are_written_and_sizes_are_no_tensors(analysed: list[Any], name: str) -> None:
    if name == NEWER and not hasattr(triton_kernel_wrap, "TensorAccesses"):
        pytest.skip("torch before 2.13 has no such result")
    ours = Kernel()
    known_accesses.declare(ours, *ARGUMENTS)
    for kernel in (ours, SimpleNamespace(fn=ours, configs=[])):  # and as its autotuner
        read, written = told(name, kernel)
        assert written == ["y0", "y1"]
        assert read == ([] if name == OLDER else ["x0", "x1", "y0", "y1"])
    assert not analysed


def test_a_torch_that_wants_to_know_more_analyses_ours_as_well(
    analysed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accesses(read_writes: Any, can_fuse_epilogue: bool, *, of_a_newer_torch: bool) -> None:
        raise AssertionError("made")

    monkeypatch.setattr(triton_kernel_wrap, "TensorAccesses", accesses, raising=False)
    ours = Kernel()
    known_accesses.declare(ours, *ARGUMENTS)
    assert getattr(triton_kernel_wrap, NEWER)(ours, {"x0": 1}) == ["x0"]
    assert analysed == [ours]


@pytest.mark.parametrize("name", known_accesses.ANALYSES)
def test_kernels_of_others_are_analysed_each_time(analysed: list[Any], name: str) -> None:
    known_accesses.declare(Kernel(), *ARGUMENTS)
    ask, other = getattr(triton_kernel_wrap, name), Kernel()
    assert ask(other, {"x0": 1}) == ["x0"]
    assert ask(other, {"x1": 1}) == ["x1"]
    assert analysed == [other, other]


def test_torch_has_the_analysis_under_one_of_its_names() -> None:
    assert any(callable(getattr(triton_kernel_wrap, name, None)) for name in known_accesses.ANALYSES)
