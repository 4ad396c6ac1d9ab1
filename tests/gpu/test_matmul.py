"""The CUDA matmuls against the torch reference, for every granularity, odd sizes, biases and output dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers

pytestmark = pytest.mark.gpu

PAIRS = [
    ("tensor", "tensor"),
    ("row", "row"),
    ("row", "tensor"),
    ("tensor", "row"),
    ("group(128)", "block(128)"),
    ("block(128)", "group(128)"),
    ("group(128)", "group(128)"),
]
BF16_EPS = 2.0**-8


def _operand(rows: int, cols: int, granularity: str, format: str, batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, rows, cols) if batch else (rows, cols)
    x = torch.randn(shape, device="cuda") * torch.rand(*shape[:-1], 1, device="cuda").mul(4).exp2()
    scale = markers.scale(markers.amax(x, granularity), format)
    return markers.quantize(x, scale, format, granularity), scale


def _check(out: torch.Tensor, expected: torch.Tensor) -> None:
    # One BF16 rounding of the result, and the FP8 units' accumulation: products summed with at least 14 bits
    # (measured on Hopper without fast accumulation), so an error of 2^-13 of the sum of magnitudes, here ≤ 8x the RMS.
    assert out.dtype == expected.dtype
    rms = expected.float().pow(2).mean().sqrt()
    torch.testing.assert_close(out.float(), expected.float(), rtol=2 * BF16_EPS, atol=8 * 2.0**-8 * rms.item())


@pytest.mark.parametrize(("how_a", "how_b"), PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 512, 384), (16, 16, 128), (48, 80, 1024)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matches_reference(how_a: str, how_b: str, m: int, n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    a, scale_a = _operand(m, k, how_a, "e4m3")
    b, scale_b = _operand(n, k, how_b, "e4m3")
    bias = torch.randn(n, device="cuda", dtype=dtype) if with_bias else None
    args = (a, scale_a, how_a, b, scale_b, how_b, bias, dtype)
    _check(scaled_mm.scaled_mm(*args), markers.scaled_mm(*args))


@pytest.mark.parametrize(("how_a", "how_b"), PAIRS[:4])
@pytest.mark.parametrize("m", [1, 3, 17, 33, 250])
def test_any_number_of_rows(how_a: str, how_b: str, m: int) -> None:
    a, scale_a = _operand(m, 256, how_a, "e4m3")
    b, scale_b = _operand(128, 256, how_b, "e4m3")
    args = (a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16)
    _check(scaled_mm.scaled_mm(*args), markers.scaled_mm(*args))


@pytest.mark.parametrize(("format_a", "format_b"), [("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize(("how_a", "how_b"), PAIRS[:4])
def test_mixed_formats(format_a: str, format_b: str, how_a: str, how_b: str) -> None:
    a, scale_a = _operand(64, 256, how_a, format_a)
    b, scale_b = _operand(128, 256, how_b, format_b)
    args = (a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16)
    _check(scaled_mm.scaled_mm(*args), markers.scaled_mm(*args))


@pytest.mark.parametrize(("how_a", "how_b"), PAIRS)
def test_batches(how_a: str, how_b: str) -> None:
    a, scale_a = _operand(64, 256, how_a, "e4m3", batch=3)
    b, scale_b = _operand(128, 256, how_b, "e4m3", batch=3)
    args = (a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16)
    _check(scaled_mm.scaled_mm(*args), markers.scaled_mm(*args))


@pytest.mark.parametrize(("how_a", "how_b"), PAIRS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_in_non_finite_out(how_a: str, how_b: str, bad: float) -> None:
    x = torch.randn(64, 256, device="cuda")
    x[3, 7] = bad
    scale_a = markers.scale(markers.amax(x, how_a), "e4m3")
    a = markers.quantize(x, scale_a, "e4m3", how_a)
    b, scale_b = _operand(128, 256, how_b, "e4m3")
    out = scaled_mm.scaled_mm(a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16)
    assert not out[3].isfinite().any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 128), (64, 64, 0), (0, 16, 0)])
def test_empty(m: int, n: int, k: int) -> None:
    a, b = (torch.empty(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    one = torch.ones((), device="cuda")
    out = scaled_mm.scaled_mm(a, one, "tensor", b, one, "tensor", None, torch.bfloat16)
    assert out.shape == (m, n)
    assert (out == 0).all()


@pytest.mark.parametrize("granularity", ["tensor", "row", "group(16)", "group(128)", "block(128)"])
@pytest.mark.parametrize("transpose", [False, True])
def test_compiled_casts_agree_with_eager(granularity: str, transpose: bool) -> None:
    """Casts as Inductor compiles them. Triton divides approximately: scales differ by an ULP, and payloads by one code
    where x / scale lies on the border of two; with the 8 bits of BF16 that is so for one element in some hundreds."""
    x = torch.randn(300, 520, device="cuda", dtype=torch.bfloat16)

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = markers.scale(markers.amax(x, granularity, transpose), "e4m3")
        return markers.quantize(x, scale, "e4m3", granularity, transpose), scale

    data, scale = cast(x)
    compiled_data, compiled_scale = torch.compile(cast)(x)
    torch.testing.assert_close(compiled_scale, scale, rtol=2.0**-22, atol=0)
    codes, expected = compiled_data.view(torch.uint8).int(), data.view(torch.uint8).int()
    different = codes != expected
    assert different.float().mean() < 4e-3
    assert ((codes - expected).abs() <= 1).all()


def test_all_pairs_are_covered() -> None:
    coarse, fine = ("tensor", "row"), ("group(128)", "block(128)")
    known = {*itertools.product(coarse, coarse), *itertools.product(fine, fine)} - {("block(128)", "block(128)")}
    assert set(PAIRS) == known
