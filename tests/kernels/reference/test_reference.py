"""The reference of the FP8 operators against tables and float64 products that share no code with it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fp8compile.formats import E4M3, E5M2, FORMATS, parse_granularity
from fp8compile.kernels.reference import markers

GRANULARITIES = ("tensor", "row", "group(16)", "group(32)", "group(64)", "group(128)", "block(128)")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 1), (3, 5), (16, 128), (5, 130), (130, 257))  # below, on and past the borders of groups and blocks
INF, NAN = float("inf"), float("nan")


def decode(code: int, name: str) -> float:
    """The value of an 8-bit code, from the formats' definition (OCP 8-bit floating point, tables 1 and 2)."""
    bits, bias = (3, 7) if name == "e4m3" else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> bits, code & ((1 << bits) - 1)
    if name == "e4m3" and code & 0x7F == 0x7F:
        return NAN
    if name == "e5m2" and exponent == 31:
        return sign * INF if mantissa == 0 else NAN
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - bits)
    return sign * (1 + mantissa / (1 << bits)) * 2.0 ** (exponent - bias)


def codes_of(values: np.ndarray, name: str) -> np.ndarray:
    """The nearest finite code of each value by brute force over all of them; a tie goes to the even code."""
    table = [(decode(c, name), c) for c in range(256)]
    finite = sorted({v: c for v, c in reversed(table) if math.isfinite(v) and v >= 0}.items())
    levels = np.array([v for v, _ in finite])
    codes = np.array([c for _, c in finite])
    distance = np.abs(np.abs(values)[:, None] - levels[None, :])
    odd = (codes % 2)[None, :]
    best = np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=1)[:, 0]
    return codes[best] | np.where(np.signbit(values), 0x80, 0)


def amax_by_loops(x: np.ndarray, granularity: str) -> np.ndarray:
    """The largest magnitude of each part of a matrix that shares a scale, by slicing."""
    how = parse_granularity(granularity)
    rows, cols = x.shape
    high, wide = {"tensor": (rows, cols), "row": (1, cols)}.get(
        how.kind, (how.size if how.kind == "block" else 1, how.size)
    )
    tall = [[np.abs(x[r : r + high, c : c + wide]).max() for c in range(0, cols, wide)] for r in range(0, rows, high)]
    return np.array(tall, dtype=np.float32)


def spread(scale: torch.Tensor, granularity: str, shape: torch.Size) -> np.ndarray:
    """A scale repeated onto every element of a matrix, with numpy."""
    how, (rows, cols) = parse_granularity(granularity), shape
    s = scale.double().numpy().reshape((1, 1) if how.kind == "tensor" else scale.shape)
    high, wide = {"tensor": (rows, cols), "row": (1, cols)}.get(
        how.kind, (how.size if how.kind == "block" else 1, how.size)
    )
    return s.repeat(high, 0).repeat(wide, 1)[:rows, :cols]


def cast(x: torch.Tensor, granularity: str, format: str = "e4m3", power_of_two: bool = False, **layout):
    scale = markers.scale(markers.amax(x, granularity, **layout), format, power_of_two)
    return markers.quantize(x, scale, format, granularity, **layout), scale


def round_trip(x: torch.Tensor, granularity: str, format: str = "e4m3", **how) -> torch.Tensor:
    data, scale = cast(x, granularity, format, **how)
    return markers.dequantize(data, scale, granularity, torch.float32)


def sqnr(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Signal to quantization noise in decibels."""
    noise = (exact.double() - approximate.double()).norm()
    return float(20 * torch.log10(exact.double().norm() / noise))


# --- scale


@pytest.mark.parametrize("format", FORMATS)
def test_scale_is_amax_over_format_max(format):
    amax = torch.tensor([1.0, 448.0, 3.25, 1e-3, 57344.0])
    wanted = (amax.numpy() / np.float32({"e4m3": 448.0, "e5m2": 57344.0}[format])).astype(np.float32)
    assert markers.scale(amax, format).dtype == torch.float32
    assert np.array_equal(markers.scale(amax, format).numpy(), wanted)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_have_scale_one_and_stay_exact_zeros(granularity, format):
    data, scale = cast(torch.zeros(5, 130), granularity, format)
    assert torch.equal(scale, torch.ones_like(scale))
    assert not data.view(torch.uint8).any()
    assert torch.equal(markers.dequantize(data, scale, granularity, torch.float32), torch.zeros(5, 130))


@pytest.mark.parametrize("format", FORMATS)
def test_power_of_two_scale_is_one_and_lies_between_the_exact_scale_and_twice_it(format):
    amax = torch.cat([torch.rand(200) * 10.0 ** torch.arange(-30, 10).repeat(5), torch.tensor([448.0, 896.0, 57344.0])])
    exact, rounded = markers.scale(amax, format), markers.scale(amax, format, power_of_two=True)
    assert (rounded.numpy() == 2.0 ** np.round(np.log2(rounded.double().numpy()))).all()
    assert (rounded >= exact).all()
    assert (rounded < 2 * exact).all()


def test_power_of_two_scale_of_a_power_of_two_is_itself():
    amax = 448.0 * 2.0 ** torch.arange(-20.0, 20.0)
    assert torch.equal(markers.scale(amax, "e4m3", power_of_two=True), 2.0 ** torch.arange(-20.0, 20.0))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1.1754944e-38, 1e-36])
def test_scale_is_never_subnormal(amax, power_of_two):
    scale = markers.scale(torch.tensor(amax), "e4m3", power_of_two)
    assert scale >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", [INF, NAN])
def test_scale_of_a_non_finite_amax_is_non_finite(amax, power_of_two):
    assert not torch.isfinite(markers.scale(torch.tensor([amax, 1.0]), "e4m3", power_of_two)[0])
    assert torch.isfinite(markers.scale(torch.tensor([amax, 1.0]), "e4m3", power_of_two)[1])


# --- amax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_amax_is_the_maximum_of_every_part(granularity, shape, dtype):
    x = torch.randn(shape).to(dtype)
    amax = markers.amax(x, granularity)
    assert amax.dtype == torch.float32
    assert list(amax.shape) == parse_granularity(granularity).scale_shape(shape)
    assert np.array_equal(amax.numpy().reshape(-1), amax_by_loops(x.float().numpy(), granularity).reshape(-1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_batch_is_cast_matrix_by_matrix(granularity):
    x = torch.randn(3, 20, 140)
    data, scale = cast(x, granularity)
    for i in range(3):
        if granularity == "tensor":  # one scale for the whole batch
            alone = markers.quantize(x[i], scale, "e4m3", granularity)
        else:
            alone, alone_scale = cast(x[i], granularity)
            assert torch.equal(alone_scale, scale[i])
        assert torch.equal(alone.view(torch.uint8), data[i].view(torch.uint8))


# --- data


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_survives_a_round_trip(format):
    exact = torch.tensor([decode(c, format) for c in range(256)])
    codes = torch.arange(256)[torch.isfinite(exact)].to(torch.uint8)
    values = exact[torch.isfinite(exact)].reshape(1, -1)
    data, scale = cast(values, "tensor", format)
    assert scale == 1.0  # the largest code is the format's maximum
    assert torch.equal(data.view(torch.uint8).reshape(-1), codes)
    assert torch.equal(markers.dequantize(data, scale, "tensor", torch.float32), values)


@pytest.mark.parametrize("format", FORMATS)
def test_data_is_the_nearest_code_with_ties_to_even(format):
    levels = np.array(sorted({decode(c, format) for c in range(128) if math.isfinite(decode(c, format))}))
    ties = (levels[1:] + levels[:-1]) / 2  # exact in FP32: neighbours differ in 3 bits at most
    near = np.concatenate([np.nextafter(np.float32(ties), np.float32(t)) for t in (0.0, 1e9)])
    between = levels[:-1, None] + np.diff(levels)[:, None] * np.array([0.1, 0.3, 0.7, 0.9])
    positive = np.concatenate([levels, ties, near, between.ravel()]).astype(np.float32)
    values = np.concatenate([positive, -positive])
    data = markers.quantize(torch.tensor(values)[None], torch.tensor(1.0), format, "tensor")
    assert np.array_equal(data.view(torch.uint8).numpy()[0], codes_of(values, format))


@pytest.mark.parametrize("format", FORMATS)
def test_a_value_beyond_the_maximum_saturates(format):
    top = FORMATS[format].max
    x = torch.tensor([[top * 1.01, top * 1.2, top * 1e10, -top * 1.01, -top * 1e10]])
    data = markers.quantize(x, torch.tensor(1.0), format, "tensor")
    assert data.float().tolist() == [[top, top, top, -top, -top]]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_current_scaling_never_saturates_anything_but_the_maximum(granularity, format, power_of_two):
    x = torch.randn(130, 257) * torch.logspace(-6, 6, 257)
    data, scale = cast(x, granularity, format, power_of_two)
    ratio = np.abs(x.double().numpy()) / spread(scale, granularity, x.shape)
    # scale = amax/max rounded once: amax/scale exceeds max by half an FP32 ULP (2^-24) at most; that much is cut off
    assert ratio.max() <= FORMATS[format].max * (1 + 2.0**-23)
    assert torch.isfinite(data.float()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_data_and_scale_stand_for_x(granularity, shape, dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    data, scale = cast(x, granularity)
    assert data.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    s = spread(scale, granularity, x.shape)
    exact = x.double().numpy()
    # half the distance of neighbouring codes: 2^-4 relative for normal codes (3 bits of mantissa), half of 2^-9 scales
    # for subnormal ones; 2^-22 for the FP32 roundings of the quotient and of the product
    bound = np.maximum(np.abs(exact) * 2.0**-4, s * 2.0**-10) * (1 + 2.0**-20)
    error = np.abs(markers.dequantize(data, scale, granularity, torch.float32).double().numpy() - exact)
    assert (error <= bound).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_hand_computed_block(granularity):
    x = torch.tensor([[448.0, 1.0, -18.0, 0.0], [224.0, 0.5, 17.0, -19.0]])
    # row 0: scale 1, and -18 is a code; row 1: scale 1/2 where it has its own, so 34 → 34 lies between 32 and 36 → 32
    # (tie to even), -38 between -36 and -40 → -40 (tie to even); with scale 1, 17 → 16 and -19 → -20 are such ties
    own_scale = granularity not in ("tensor", "block(128)")
    wanted = [[448.0, 1.0, -18.0, 0.0], [224.0, 0.5, 16.0, -20.0]]
    data, scale = cast(x, granularity)
    assert markers.dequantize(data, scale, granularity, torch.float32).tolist() == wanted
    assert data[1].float().tolist() == ([448.0, 1.0, 32.0, -40.0] if own_scale else wanted[1])
    assert scale.reshape(-1).tolist() == ([1.0, 0.5] if own_scale else [1.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rounds_once_to_the_dtype(dtype):
    data = torch.tensor([[448.0, -1.125, 0.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.3)
    wanted = (torch.tensor([[448.0, -1.125, 0.0]]) * scale).to(dtype)
    assert torch.equal(markers.dequantize(data, scale, "tensor", dtype), wanted)


# --- layouts


@pytest.mark.parametrize("multiples", [(1, 1), (16, 1), (1, 16), (16, 128)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transposed_equals_the_cast_of_the_transpose(granularity, multiples):
    x = torch.randn(2, 21, 140)
    layout = {"row_multiple": multiples[0], "col_multiple": multiples[1]}
    turned, turned_scale = cast(x, granularity, transpose=True, **layout)
    plain, plain_scale = cast(x.transpose(-1, -2).contiguous(), granularity, **layout)
    assert torch.equal(turned_scale, plain_scale)
    assert torch.equal(turned.view(torch.uint8), plain.view(torch.uint8))
    assert turned.is_contiguous()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_padding_appends_zeros_and_changes_nothing_else(granularity):
    x = torch.randn(21, 140)
    plain, plain_scale = cast(x, granularity)
    data, scale = cast(x, granularity, row_multiple=16, col_multiple=128)
    assert data.shape == (32, 256)
    assert torch.equal(data[:21, :140].view(torch.uint8), plain.view(torch.uint8))
    assert not data[21:].view(torch.uint8).any()
    assert not data[:, 140:].view(torch.uint8).any()
    if granularity == "tensor":
        assert torch.equal(scale, plain_scale)
    else:
        rows, cols = plain_scale.shape
        assert torch.equal(scale[:rows, :cols], plain_scale)
        if scale.shape[0] > rows:  # a padding row has its own scale: that of zeros
            assert (scale[rows:] == 1).all()


def test_multiples_that_divide_already_append_nothing():
    x = torch.randn(16, 128)
    assert cast(x, "row", row_multiple=16, col_multiple=128)[0].shape == (16, 128)


# --- extreme magnitudes


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-30, 1e30, 1e38])
def test_extreme_magnitudes_neither_overflow_nor_vanish_beyond_the_bound(granularity, size):
    x = torch.randn(5, 130).clamp(-3, 3) * size
    data, scale = cast(x, granularity)
    back = markers.dequantize(data, scale, granularity, torch.float32).double().numpy()
    exact, s = x.double().numpy(), spread(scale, granularity, x.shape)
    assert np.isfinite(back).all()
    # as in test_data_and_scale_stand_for_x; the smallest FP32 number, 2^-149, for products that are subnormal
    bound = np.maximum(np.abs(exact) * 2.0**-4, s * 2.0**-10) * (1 + 2.0**-20) + 2.0**-149
    assert (np.abs(back - exact) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_number_of_a_dtype_stays_finite(dtype, format):
    top = torch.finfo(dtype).max
    x = torch.tensor([[top, -top, top / 3, 0.0]], dtype=dtype)
    data, scale = cast(x, "row", format)
    assert torch.isfinite(markers.dequantize(data, scale, "row", dtype)).all()


# --- non-finite values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_non_finite_in_non_finite_out_only_where_the_scale_is_shared(granularity, bad, format):
    x = torch.randn(130, 257)
    x[129, 130] = bad
    clean = x.clone()
    clean[129, 130] = 0.0
    back = round_trip(x, granularity, format)
    marks = torch.zeros(130, 257)
    marks[129, 130] = 1.0
    scale_mark = markers.amax(marks, granularity)
    hit = torch.tensor(spread(scale_mark, granularity, x.shape) > 0)
    assert not torch.isfinite(back[hit]).any()
    assert torch.equal(back[~hit], round_trip(clean, granularity, format)[~hit])


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_non_finite_zero_padded_operand_keeps_its_overflow(granularity, bad):
    x = torch.randn(21, 140)
    x[20, 139] = bad
    data, scale = cast(x, granularity, row_multiple=16, col_multiple=128)
    back = markers.dequantize(data, scale, granularity, torch.float32)
    assert not torch.isfinite(back[20, 139])


# --- empty tensors


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (2, 0, 16)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_tensors_are_cast_to_empty_data(granularity, shape):
    data, scale = cast(torch.empty(shape), granularity)
    assert data.shape == shape
    assert list(scale.shape) == parse_granularity(granularity).scale_shape(shape)
    assert markers.dequantize(data, scale, granularity, torch.bfloat16).shape == shape


# --- scaled_mm


COARSE = list(itertools.product(("tensor", "row"), repeat=2))
FINE = [("group(128)", "block(128)"), ("group(128)", "group(128)"), ("block(128)", "group(128)")]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("pair", COARSE + FINE, ids="×".join)
def test_scaled_mm_is_the_product_of_the_dequantized_operands(pair, with_bias, out_dtype):
    m, n, k = 21, 32, 272
    a, scale_a = cast(torch.randn(m, k), pair[0])
    b, scale_b = cast(torch.randn(n, k) / 8, pair[1])
    bias = torch.randn(n).to(out_dtype) if with_bias else None
    left = a.double().numpy() * spread(scale_a, pair[0], a.shape)
    right = b.double().numpy() * spread(scale_b, pair[1], b.shape)
    wanted = left @ right.T + (0.0 if bias is None else bias.double().numpy())
    out = markers.scaled_mm(a, scale_a, pair[0], b, scale_b, pair[1], bias, out_dtype)
    assert out.dtype == out_dtype
    # sums of k FP32 products: k·2^-24 of the sum of magnitudes at worst, and one rounding to out_dtype
    bound = (k + 8) * 2.0**-24 * (np.abs(left) @ np.abs(right).T + 4) + torch.finfo(out_dtype).eps / 2 * np.abs(wanted)
    assert (np.abs(out.double().numpy() - wanted) <= bound).all()


@pytest.mark.parametrize("pair", COARSE + FINE, ids="×".join)
def test_scaled_mm_of_a_batch_is_that_of_each_matrix(pair):
    a, scale_a = cast(torch.randn(3, 16, 128), pair[0])
    b, scale_b = cast(torch.randn(3, 32, 128), pair[1])
    out = markers.scaled_mm(a, scale_a, pair[0], b, scale_b, pair[1], None, torch.float32)
    for i in range(3):
        one = markers.scaled_mm(
            a[i],
            scale_a if pair[0] == "tensor" else scale_a[i],
            pair[0],
            b[i],
            scale_b if pair[1] == "tensor" else scale_b[i],
            pair[1],
            None,
            torch.float32,
        )
        # the batched and the single matmul may sum 128 terms in another order: 128·2^-24 of about 128 products near 1
        torch.testing.assert_close(out[i], one, rtol=0, atol=128 * 2.0**-24 * 128)


def test_scaled_mm_multiplies_e5m2_with_e4m3():
    a, scale_a = cast(torch.tensor([[1.0, -3.0], [0.5, 57344.0]]), "row", "e5m2")
    b, scale_b = cast(torch.tensor([[2.0, 4.0]]), "tensor", "e4m3")
    left = markers.dequantize(a, scale_a, "row", torch.float32)
    out = markers.scaled_mm(a, scale_a, "row", b, scale_b, "tensor", None, torch.float32)
    # 1 and -3 are E5M2 codes under a scale 3/57344; the products are small integers up to FP32's rounding
    torch.testing.assert_close(out, left @ torch.tensor([[2.0], [4.0]]), rtol=1e-6, atol=0)
    assert left[1, 1] == 57344.0


def test_fast_accumulation_changes_nothing_in_the_reference():
    a, scale_a = cast(torch.randn(16, 32), "row")
    b, scale_b = cast(torch.randn(16, 32), "row")
    outs = [
        markers.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.float32, fast) for fast in (False, True)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("pair", COARSE + FINE, ids="×".join)
def test_a_non_finite_row_makes_its_results_non_finite(pair, bad):
    x = torch.randn(16, 128)
    x[3, 5] = bad
    a, scale_a = cast(x, pair[0])
    b, scale_b = cast(torch.randn(16, 128), pair[1])
    out = markers.scaled_mm(a, scale_a, pair[0], b, scale_b, pair[1], None, torch.bfloat16)
    assert not torch.isfinite(out[3]).any()
    if pair[0] in ("row", "group(128)"):
        assert torch.isfinite(out[[0, 1, 2, *range(4, 16)]]).all()


def test_a_matmul_without_elements_to_contract_gives_zeros():
    a, scale_a = cast(torch.empty(4, 0), "tensor")
    b, scale_b = cast(torch.empty(16, 0), "tensor")
    out = markers.scaled_mm(a, scale_a, "tensor", b, scale_b, "tensor", None, torch.bfloat16)
    assert torch.equal(out, torch.zeros(4, 16, dtype=torch.bfloat16))


# --- the format's cost


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("format", "bound"),
    [
        # uniform error within a binade's step: noise/signal² = E[step²]/12 / E[x²]; for E4M3's 2^-3 steps at a mantissa
        # spread evenly over [1, 2): (1/8)²/12 / (7/3) → 32.5 dB at worst data position, 31 dB measured; 25 leaves room
        (E4M3, 25.0),
        (E5M2, 19.0),  # one bit of mantissa less: 6 dB less
    ],
    ids=str,
)
def test_a_cast_of_normal_data_keeps_its_signal(granularity, format, bound):
    x = torch.randn(256, 256)
    assert sqnr(x, round_trip(x, granularity, format.name)) >= bound


def test_outliers_cost_a_tensor_scale_more_than_a_row_scale():
    x = torch.randn(64, 256)
    x[0] *= 1e6
    rest = slice(1, None)
    assert sqnr(x[rest], round_trip(x, "row")[rest]) >= 25.0
    # 1e6·3/448 is a scale of 7e3: everything else is far below half the smallest code, 2^-10 · 7e3 = 7
    assert not round_trip(x, "tensor")[rest].any()
