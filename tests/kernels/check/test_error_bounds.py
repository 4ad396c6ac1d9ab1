"""What a GPU may do to a product without rounding it: bounds are inf where that decides whether it overflows."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.kernels.check.error_bounds import Bounds
from fp8compile.kernels.codegen.schedule.tiling import Tiling
from fp8compile.kernels.codegen.spec.region import Input, Part, Value
from fp8compile.kernels.reference.region_reference import Evaluation

ROWS, COLS = ((1, 4),), ((4, 1),)
A = [2e38, 2e38, 1e30, 1.0]
B = [3.0, 1e10, 1e8, 1.0]  # products: beyond FP32 by 2, by far, within, within


@pytest.mark.parametrize(("factor", "on_gpu", "unsure"), [(0.5, True, 2), (0.3, True, 0), (0.5, False, 0)])
def test_a_half_of_a_product_may_not_overflow_on_the_way(factor: float, on_gpu: bool, unsure: int) -> None:
    values = (
        Value("load", (), (0,)), Value("load", (), (1,)), Value("mul", (0, 1)), Value("constant", (), (factor,)),
        Value("mul", (2, 3)),
    )  # fmt: skip
    part = Part(1, 4, (Input(0, "float32", ROWS, COLS), Input(1, "float32", ROWS, COLS)), values, ())
    found = Evaluation(part, [torch.tensor(A), torch.tensor(B)], {})
    assert found[4][0].isinf().tolist() == [True, True, False, False]
    bound = Bounds(found, Tiling(1, 4, 1, 1), {}, on_gpu)[4][0].tolist()
    assert [b == math.inf for b in bound] == [True] * unsure + [False] * (4 - unsure)
    assert bound[2:] == [0.0, 0.0]
