"""Measuring casts on a GPU: the kernels against plain torch on the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.kernels.casts import cast_losses
from fp8compile.kernels.casts.cast_losses import PLAIN, measure
from fp8compile.kernels.reference import markers

pytestmark = pytest.mark.gpu
CASTS = ["e4m3 tensor", "e5m2 tensor", "e4m3 row", "e4m3 group(16)", "e4m3 group(128)", "e4m3 block(128)"]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 1003), (3, 257, 640), (1, 130), (2048, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_measured_with_kernels_or_in_plain_torch(
    dtype: torch.dtype, shape: tuple[int, ...], cast: str, transpose: bool
):
    """Values are the same; sums of up to 128 FP32 numbers are less than 128 · 2^-24 off."""
    format, granularity = cast.split(" ")
    x = (torch.randn(shape, device="cuda") * torch.randn(shape[-1], device="cuda").exp()).to(dtype)
    scale = 0.7 * markers.scale(markers.amax(x, granularity, transpose), format)
    ours, plain = (measure(scale, [x, -x], cast, transpose, kernels) for kernels in (None, PLAIN))
    torch.testing.assert_close(ours, plain, rtol=2.0**-17, atol=0)


def test_offsets_beyond_32_bits():
    x = torch.zeros(2**31 + 8, device="cuda", dtype=torch.bfloat16)
    x[-1], x[0] = -5.0, 2.0
    largest, above = cast_losses.kernels_for(x).extremes([x], torch.tensor(0.001, device="cuda"), "e4m3")
    assert (largest.item(), above.item()) == (5.0, 2)


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "rowwise"])
def test_in_training(recipe: str):
    model = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).cuda().bfloat16()
    watched = fp8compile.watch(model, options={"strict": True, "select": "all", "recipe": recipe})
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        watched(x).square().mean().backward()
    rows = watched.statistics.rows()
    assert {(row.steps, row.skipped, row.saturated) for row in rows} == {(2, 0, 0.0)}
    assert all(row.sqnr is not None and 20 < row.sqnr < 45 for row in rows if not row.cast.startswith("e5m2"))
    first = next(row for row in rows if (row.path, row.role, row.side) == ("0", "output", "left"))
    assert first.amax == x.abs().max().item()
