"""A head in FP8, in chunks: the operator against sums written down by hand, its kernels (interpreted) against torch."""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor

from fp8compile import ops
from fp8compile.kernels.casts import grouped_cast
from fp8compile.kernels.loss import fp8_head
from fp8compile.kernels.loss.chunked_loss import chunks, run_in_fp8
from fp8compile.kernels.loss.softmax_step import DROPPED, Curve, plain_step

interpreted = pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_chunked_loss.py runs it compiled")
M, K, N, ROWS = 60, 32, 70, 20  # chunks of 16 rows and a part of one; classes that are filled up
AT_ONCE = 40  # rows whose weight gradient is computed at once: two chunks, and what is left
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_head, "rows_at_once", lambda k: AT_ONCE)


def in_rows(x: Tensor, largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of x, in FP64 but for the codes' own rounding and the scales' FP32."""
    amax = x.float().abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / largest)
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    return in_rows(x, 448.0, torch.float8_e4m3fn)


def padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % 16, x.shape[1])])


def data(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((M, K), (N, K), (N,)))
    x, weight, bias = x.to(dtype), (weight / K**0.5).to(dtype), bias.to(dtype)
    index, weights = torch.randint(0, N, (M,), generator=g), torch.rand(M, generator=g)
    index[5], index[15:40] = DROPPED, DROPPED  # a whole chunk, parts of others, and one row
    wide = padded(weight)
    operands = [x, *cast(x), *cast(wide), *cast(wide.t().contiguous())]
    return {"operands": operands, "bias": bias / 4, "index": index, "weights": weights, "weight": weight}


def arguments(given: dict[str, Any], wanted: list[bool], **more: Any) -> tuple[Any, ...]:
    given = given | more
    curve = given.get("curve", Curve())
    return (
        *given["operands"], given["bias"], given["index"], given["weights"], N, ROWS, curve.inner, curve.outer, wanted,
        given.get("every_term", False), given.get("exact", False),
    )  # fmt: skip


def by_hand(given: dict[str, Any]) -> list[Tensor]:
    """What the operator is to compute of the same operands, chunk by chunk, with sums in FP64."""
    x, codes, scales, weight_codes, weight_scales, turned_codes, turned_scales = given["operands"]
    weight = (weight_codes.double() * weight_scales)[:N]
    turned = (turned_codes.double() * turned_scales)[:, :N]
    terms, of_x, of_weight = x.new_zeros(M, dtype=torch.double), torch.zeros(M, K).double(), torch.zeros(N, K).double()
    of_bias = torch.zeros(N).double()
    everything, row_scales = torch.zeros(M, N).double(), torch.zeros(M, 1)
    for part in chunks(M, 16):
        logits = ((codes[part].double() * scales[part]) @ weight.t()).to(x.dtype) + given["bias"]
        index, counts = given["index"][part], given["index"][part] != DROPPED
        at = index.clamp_min(0).unsqueeze(1)
        terms[part] = logits.double().log_softmax(-1).gather(1, at).squeeze(1)
        slopes = logits.float().softmax(-1).scatter_add(1, at, torch.full_like(at, -1.0, dtype=torch.float32))
        slopes = (slopes * (given["weights"][part] * counts).unsqueeze(1)).to(x.dtype)
        q, s = in_rows(slopes, 57344.0, torch.float8_e5m2)
        of_x[part] = (q.double() * s) @ turned.t()
        everything[part], row_scales[part] = q.double(), torch.where(counts, s.squeeze(1), 0.0).unsqueeze(1)
        of_bias += slopes.double().sum(0)
    wide = torch.float32 if x.dtype is torch.float32 else torch.bfloat16
    for part in (slice(0, 32), slice(32, M)):
        scaled = (x[part].float() * row_scales[part]).to(wide)
        columns, of_columns = cast(scaled.t().contiguous())
        of_weight += everything[part].t() @ (columns.double() * of_columns).t()
    return [terms, of_x, of_weight, of_bias]


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_computes_what_is_written_down_by_hand(dtype: torch.dtype) -> None:
    given = data(dtype)
    got = ops.chunked_loss_in_fp8(*arguments(given, [True, True, True]))
    counts = given["index"] != DROPPED
    for i, (a, b) in enumerate(zip(got, by_hand(given), strict=True)):
        assert a.dtype is torch.float32
        # logits in FP32 sums may round to the next BF16, or a slope to the next code: single elements
        assert error(a[counts], b[counts]) < 5e-3 if i == 0 else error(a, b) < 5e-3
    assert not got[1][~counts].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_near_exact_gradients(dtype: torch.dtype) -> None:
    """A grad_weight of the same slopes in BF16 is nearer; rows of other magnitudes disturb nobody."""
    given = data(dtype)
    given["weights"] = torch.logspace(-6, 0, M)  # gradients of rows from one to a million
    logits = given["operands"][0].double() @ given["weight"].double().t() + given["bias"].double()
    logits.requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, given["index"].clamp_min(0), reduction="none")
    counts = (given["index"] != DROPPED) * given["weights"].double()
    (slopes,) = torch.autograd.grad((losses * counts).sum(), logits)
    exact = slopes @ given["weight"].double(), slopes.t() @ given["operands"][0].double()
    errors = []
    for grad_weight in (False, True):
        _, of_x, of_weight = ops.chunked_loss_in_fp8(*arguments(given, [True, True, False], exact=grad_weight))
        rows = ((of_x.double() - exact[0]).norm(dim=1) / exact[0].norm(dim=1))[counts > 0]
        assert rows.max() < 0.15  # each row by itself: E5M2 of few large slopes, E4M3 of the weight, rounded logits
        errors.append(error(of_weight, exact[1]))
    assert 0.002 < errors[1] < errors[0] / 2 < 0.03, errors


def test_only_what_is_wanted_is_computed() -> None:
    given = data()
    (terms,) = ops.chunked_loss_in_fp8(*arguments(given, [False] * 3, weights=None))
    assert list(terms.shape) == [M]
    *operands, _, _ = given["operands"]
    some = ops.chunked_loss_in_fp8(*arguments(given | {"operands": [*operands, None, None]}, [False, True, False]))
    assert [list(r.shape) for r in some] == [[M], [N, K]]
    whole = ops.chunked_loss_in_fp8(*arguments(given, [True, True, True]))
    assert torch.equal(some[1], whole[2])


def test_no_rows_have_no_gradients() -> None:
    given = data()
    x, codes, scales, *weights = given["operands"]
    none = {"operands": [x[:0], codes[:0], scales[:0], *weights], "index": given["index"][:0]}
    terms, *got = ops.chunked_loss_in_fp8(*arguments(given | none, [True] * 3, weights=given["weights"][:0]))
    assert terms.numel() == 0
    assert not any(g.any() for g in got)


def test_a_label_that_is_no_class_raises() -> None:
    given = data()
    given["index"][3] = N  # there is a code for it, of zeros
    with pytest.raises(RuntimeError, match="a label is out of bounds"):
        ops.chunked_loss_in_fp8(*arguments(given, [True] * 3))


def test_what_is_not_finite_stays_so() -> None:
    given = data()
    x = given["operands"][0].clone()
    x[2, 3] = torch.nan
    operands = [x, *cast(x), *given["operands"][3:]]
    terms, of_x, of_weight, of_bias = ops.chunked_loss_in_fp8(*arguments(given | {"operands": operands}, [True] * 3))
    assert terms[2].isnan()
    assert of_x[2].isnan().all()
    assert of_x[0].isfinite().all()
    assert of_weight.isnan().all()
    assert of_bias.isnan().all()


def test_the_operator_obeys_the_rules_of_operators() -> None:
    tests = ("test_faketensor",)  # that of schemas multiplies its inputs, codes too
    torch.library.opcheck(ops.chunked_loss_in_fp8, arguments(data(), [True] * 3), test_utils=tests)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The interpreted kernels, with tiles so small that there are several."""
    interpreter.prepare()
    from fp8compile.kernels.loss import slope_cast, softmax_gradient

    monkeypatch.setattr(softmax_gradient, "BLOCK", 32)
    monkeypatch.setattr(slope_cast, "ROWS", 16)
    monkeypatch.setattr(slope_cast, "COLUMNS", 32)
    return {
        "step": softmax_gradient.step,
        "cast_slopes": slope_cast.cast_slopes,
        "grouped_cast": grouped_cast.grouped_cast,
    }


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "classes"), [(1, 70), (17, 64), (32, 33)])
def test_slopes_are_cast_as_plain_torch_casts_them(
    kernels: dict[str, Any], dtype: torch.dtype, rows: int, classes: int
) -> None:
    slopes = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
    slopes *= torch.logspace(-9, 0, classes)  # down to where E5M2 has no numbers
    slopes[0] = 0.0
    if rows > 20:
        slopes[3, 4], slopes[5, 6] = torch.nan, torch.inf
    wide = torch.full((rows, 80), 7.0).to(dtype)  # rows with something between them
    wide[:, :classes] = slopes.to(dtype)
    given = wide[:, :classes], wide[:, :classes].abs().amax(1).float()
    found = []
    for cast_slopes in (kernels["cast_slopes"], fp8_head.cast_slopes):
        codes = torch.empty(rows, 80, dtype=torch.uint8).view(torch.float8_e5m2)
        block = torch.full([80, 96], 7, dtype=torch.uint8)
        place = block[:, 32:80].view(torch.float8_e5m2)
        scales = cast_slopes(*given, codes, place)
        assert (block[:, :32] == 7).all()  # that of other rows
        assert (block[:, 80:] == 7).all()
        for only in ((None, place), (codes, None)):
            assert torch.equal(cast_slopes(*given, *only).nan_to_num(), scales.nan_to_num())
        found.append([scales, codes, place])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.float().nan_to_num(-1.0), b.float().nan_to_num(-1.0))


@interpreted
@pytest.mark.parametrize("every_term", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_amaxes_are_those_of_the_slopes(kernels: dict[str, Any], dtype: torch.dtype, every_term: bool) -> None:
    g = torch.Generator().manual_seed(0)
    wide = (3 * torch.randn(6, 112, generator=g)).to(dtype)
    logits, index = wide[:, :100], torch.tensor([0, 99, 40, DROPPED, 7, 8])
    weights = torch.randn(4, 6, generator=g) if every_term else torch.rand(6, generator=g)
    amaxes = torch.full([6], torch.nan)
    kernels["step"](logits, index, weights, Curve(0.5, 8.0), True, every_term, amaxes)
    assert torch.equal(amaxes, logits.abs().amax(1).float())
    assert amaxes[3] == 0
    plain_step(logits, index, weights, Curve(0.5, 8.0), True, every_term, amaxes)
    assert torch.equal(amaxes, logits.abs().amax(1).float())


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_with_the_kernels_is_the_operator(kernels: dict[str, Any], dtype: torch.dtype) -> None:
    args = arguments(data(dtype), [True, True, True])
    for a, b in zip(run_in_fp8(*args, **kernels), run_in_fp8(*args), strict=True):
        # exponentials differ in last bits: of 70 · 44 slopes some fall to the next code, each off by an eighth
        assert error(a.nan_to_num(), b.nan_to_num()) < 5e-3
