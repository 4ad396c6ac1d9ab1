"""The trials of torch's grouped matmul, in both forms: they take the right product, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.kernels.matmul import check_grouped

CPU = torch.device("cpu")


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    """What torch documents of `_scaled_grouped_mm`, by a loop: a [M, K], b [E, K, N], scales [M] and [E, N]."""
    assert b.stride(-2) == 1, "each matrix is column-major"
    out, start = torch.full((a.shape[0], b.shape[-1]), float("nan"), dtype=how["out_dtype"]), 0
    for e, end in enumerate(offs.tolist()):
        rows = (a[start:end].double() * scale_a[start:end, None].double()) @ (b[e].double() * scale_b[e].double())
        out[start:end], start = rows.to(how["out_dtype"]), end
    return out


def shifted(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    return product(a, b.roll(1, 0).mT.contiguous().mT, scale_a, scale_b, offs, **how)


def unscaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    return product(a, b, scale_a, scale_b.mean(1, keepdim=True).expand_as(scale_b), offs, **how)


def unwritten(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    out = (product if b.dim() == 3 else contraction)(a, b, scale_a, scale_b, offs, **how)
    out[3] = float("nan")
    return out


def contraction(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    """The same of groups that are contracted: a [M, P], b [P, N], scales [E · M] and [E · N], none empty."""
    assert (a.stride(1), b.stride(0)) == (1, 1), "what is contracted lies side by side"
    sizes = offs.diff(prepend=offs.new_zeros(1))
    assert ((sizes > 0) & (sizes % 16 == 0)).all(), "the kernel stops the program"
    out, start = torch.full((len(offs), a.shape[0], b.shape[1]), float("nan"), dtype=how["out_dtype"]), 0
    scales = scale_a.view(len(offs), -1, 1).double(), scale_b.view(len(offs), 1, -1).double()
    for e, end in enumerate(offs.tolist()):
        out[e] = ((a[:, start:end].double() @ b[start:end].double()) * scales[0][e] * scales[1][e]).to(how["out_dtype"])
        start = end
    return out


def of_another_group(*given: Tensor, **how: Any) -> Tensor:
    return contraction(*given, **how).roll(1, 0)


def scaled_by_the_first(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **how: Any) -> Tensor:
    return contraction(a, b, scale_a, scale_b.view(len(offs), -1)[0].repeat(len(offs)), offs, **how)


def raising(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("Only sm90\nmore")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    trials = check_grouped.why_it_fails, check_grouped.why_contractions_fail
    for trial in trials:
        trial.cache_clear()
    yield
    for trial in trials:
        trial.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(product, ""), (shifted, "wrong"), (unscaled, "wrong"), (unwritten, "wrong"), (raising, "run here (Only sm90)")],
)  # fmt: skip
def test_what_is_taken(monkeypatch: pytest.MonkeyPatch, kernel: Any, why: str) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    with FakeTensorMode():  # as passes find it
        found = check_grouped.why_it_fails(CPU)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("fast", [False, True])
def test_both_ways_to_accumulate_are_tried(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    def kernel(*given: Tensor, **how: Any) -> Tensor:
        return (shifted if how["use_fast_accum"] == fast else product)(*given, **how)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    assert "wrong" in check_grouped.why_it_fails(CPU)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (contraction, ""), (of_another_group, "wrong"), (scaled_by_the_first, "wrong"), (unwritten, "wrong"),
        (raising, "run here (Only sm90)"),
    ],
)  # fmt: skip
def test_which_contractions_are_taken(monkeypatch: pytest.MonkeyPatch, kernel: Any, why: str) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    with FakeTensorMode():
        found = check_grouped.why_contractions_fail(CPU)
    assert why in found
    assert bool(found) == bool(why)
