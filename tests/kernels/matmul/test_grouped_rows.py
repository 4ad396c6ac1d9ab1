"""Rows in groups times the matrix of their group, by the Triton kernel in small tiles, beside the reference."""

from __future__ import annotations

import interpreter
import pytest
import torch
from experts import GROUPS, ends
from torch import Tensor

from fp8compile.kernels.reference import markers

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_grouped.py runs it compiled")
TILE = {"TM": 16, "TN": 32, "TK": 32}
NAN = 0x7F  # a code of E4M3
UNTOUCHED = 12345.0


def operands(rows: int, experts: int, n: int, k: int, inside: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, scale_a, b, scale_b) with scales that all differ; NaN in all rows from `inside` on."""
    draw = torch.Generator().manual_seed(rows + n)
    a, b = (torch.randn(*s, k, generator=draw).to(torch.float8_e4m3fn) for s in ((rows,), (experts, n)))
    a.view(torch.uint8)[inside:] = NAN
    return a, torch.rand(rows, 1, generator=draw) + 0.5, b, torch.rand(experts, n, 1, generator=draw) + 0.5


def product(sizes: list[int], n: int, k: int, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the kernel gives of 96 rows, and the reference in FP32. Nothing is written that is not a group's."""
    from fp8compile.kernels.matmul import grouped_rows

    interpreter.prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_rows, "TILE", TILE)
        offs = ends(sizes) if offs is None else offs
        given = operands(96, len(offs), n, k, sum(sizes))
        memory = torch.full((3 * 96, n), UNTOUCHED, dtype=torch.bfloat16)
        grouped_rows.launch(memory[96:192], *given, offs)
    last = min(96, int(offs.max()))
    assert (memory[:96] == UNTOUCHED).all()
    assert (memory[96 + last :] == UNTOUCHED).all()
    a, scale_a, b, scale_b = given
    right = markers.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.float32, True, ends(sizes))
    return memory[96:192], right


def assert_near(found: Tensor, right: Tensor, k: int) -> None:
    """BF16 of what FP32 sums give in another order."""
    assert found.dtype == torch.bfloat16
    size = right.abs() + right.square().mean(1, keepdim=True).sqrt()
    assert ((found.float() - right).abs() <= 2.0**-8 * right.abs() + k * 2.0**-24 * size).all()


@pytest.mark.parametrize("name", GROUPS)
def test_each_row_meets_the_matrix_of_its_group(name: str) -> None:
    """Tiles reach into other groups, and into rows that are nobody's, which hold NaN."""
    inside = sum(GROUPS[name])
    found, right = product(GROUPS[name], 48, 80)
    assert_near(found[:inside], right[:inside], 80)


@pytest.mark.parametrize(("n", "k"), [(16, 16), (32, 32), (200, 48), (40, 272)])
def test_tiles_that_are_not_full(n: int, k: int) -> None:
    """Of columns, which lie beside those of the next expert, and of what is contracted."""
    found, right = product([30, 0, 66], n, k)
    assert_near(found, right, k)


@pytest.mark.parametrize("offs", [[40, 20, 96], [96, 4000], [50, 2**31 - 1, 96]], ids=str)
def test_what_is_no_grouping_stays_within_the_result(offs: list[int]) -> None:
    found, right = product([offs[0]], 48, 80, offs=torch.tensor(offs, dtype=torch.int32))
    sure = min(offs[:2])  # rows that one group alone claims
    assert_near(found[:sure], right[:sure], 80)


def test_more_groups_than_lanes() -> None:
    sizes = [3, 0, 5] * 7
    found, right = product(sizes, 32, 32)
    assert_near(found[: sum(sizes)], right[: sum(sizes)], 32)


def test_payloads_that_a_descriptor_cannot_hold() -> None:
    from fp8compile.kernels.matmul.grouped_rows import fits

    codes = torch.zeros(33 * 32, dtype=torch.float8_e4m3fn)
    assert fits(codes[:1024].view(32, 32))
    assert fits(codes[16:1040].view(32, 32))
    assert not fits(codes[8:1032].view(32, 32)), "it begins elsewhere"
    assert not fits(codes[:1024].view(32, 32).t()), "it lies across"
    assert not fits(codes[:960].view(40, 24)), "rows begin elsewhere"
