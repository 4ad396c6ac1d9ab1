"""Uninitialised memory is NaN, so that tests see what reads it."""

from __future__ import annotations

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 4096, 1_000_003])
def test_new_tensors_are_nan(dtype: torch.dtype, size: int) -> None:
    del_me = torch.ones(size).to(dtype)
    del del_me  # memory that was in use before
    assert torch.empty(size, dtype=dtype).float().isnan().all()
    assert torch.empty_strided((size, 2), (2, 1), dtype=dtype).float().isnan().all()
